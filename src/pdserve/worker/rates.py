"""Smoothed rates of a worker's engine for its registration: prompt tokens per second, decode step time."""

from __future__ import annotations

from pdserve.engine.step_output import StepOutput

_WEIGHT = 0.2
"""Weight of the newest step in the exponential averages: about the last ten steps count."""


class StepRates:
    """Exponentially weighted averages over steps; 0 until measured."""

    def __init__(self) -> None:
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self.step_s = 0.0
        """Duration of steps in which sequences decode, in seconds."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens over the time of the steps that computed them: short steps weigh as little as they take."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0

    def note(self, output: StepOutput) -> None:
        """Add one more step to the averages."""
        if output.duration_s <= 0 or not output.num_tokens:
            return
        num_prompt_tokens = output.num_tokens - output.num_decode_tokens
        if num_prompt_tokens:
            self._prompt_tokens = _blend(self._prompt_tokens, num_prompt_tokens)
            self._prompt_s = _blend(self._prompt_s, output.duration_s)
        if output.num_decode_tokens:
            self.step_s = _blend(self.step_s, output.duration_s)


def _blend(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + _WEIGHT * (sample - average)
