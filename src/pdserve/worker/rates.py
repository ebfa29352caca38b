"""Smoothed rates of a worker's engine for its registration: prefill tokens per second, decode step time."""

from __future__ import annotations

from pdserve.engine.engine import StepOutput

_WEIGHT = 0.2
"""Of the newest step in the exponential average: about the last ten steps count."""


class StepRates:
    """Exponentially weighted averages over steps; 0 until measured."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.step_s = 0.0

    def note(self, output: StepOutput) -> None:
        """One more step."""
        if output.duration_s <= 0 or not output.num_tokens:
            return
        self.tokens_per_s = _blend(self.tokens_per_s, output.num_tokens / output.duration_s)
        self.step_s = _blend(self.step_s, output.duration_s)


def _blend(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + _WEIGHT * (sample - average)
