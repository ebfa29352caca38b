"""How long a step takes: a linear model, fitted to the last measured steps.

    seconds = overhead + sequence · B + context · K          B sequences decode, K tokens lie in their KV
                       + token · P + pair · A                P prompt tokens, A pairs of prompt token and attended token

Told about steps by the engine's thread; `fit` is one immutable value that any thread may read. It knows nothing
before it has enough steps, and nothing when they contradict each other: then the scheduler does as without a model.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from pdserve.engine.scheduling.least_squares import LinearFit, Row, fit_robustly
from pdserve.log import get_logger

logger = get_logger(__name__)

_WINDOW = 64
"""Steps that count: a few seconds, so that a neighbour on the same cores is noticed soon."""
_MIN_STEPS = 3
"""Steps before the first fit: as many as a warm-up gives."""
_STEPS_PER_COLUMN = 8
"""The first steps tell overhead (of prompts: the rate) alone: a term that few noisy steps suggest may be absurd, and
would be multiplied by numbers far beyond those seen."""
_STEPS_PER_FIT = 16
"""A fit takes about half a millisecond: even of short steps a small share."""
_MAX_ERROR = 0.35
"""Relative root mean square error; beyond it the steps contradict each other and the fit is rejected."""
_MIN_KEPT_RATIO = 0.6
"""Share of the steps that must agree with the fit; the others may have been disturbed."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, or would compute."""

    num_sequences: int = 0
    """Sequences that decode one token."""
    num_context_tokens: int = 0
    """Tokens whose KV the decoding sequences read."""
    num_prompt_tokens: int = 0
    """Tokens of all prompt chunks."""
    num_prompt_pairs: float = 0.0
    """Sum over prompt tokens of the tokens that each attends to."""


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Seconds of a step in which sequences decode."""

    overhead_s: float
    sequence_s: float
    context_s: float
    """Seconds per token of context."""

    def seconds(self, num_sequences: int, num_context_tokens: int) -> float:
        """Duration of one step."""
        return self.overhead_s + self.sequence_s * num_sequences + self.context_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class PromptTime:
    """Seconds of prompt chunks."""

    overhead_s: float
    """Seconds that a step takes whatever its chunks."""
    token_s: float
    pair_s: float

    def seconds(self, start: int, num_tokens: int) -> float:
        """Duration of one chunk at positions [start, start + num_tokens), without the step's overhead."""
        return self.token_s * num_tokens + self.pair_s * num_pairs(start, num_tokens)

    def num_tokens_within(self, start: int, seconds: float) -> float:
        """The longest chunk from `start` that takes at most this long; a fraction, or infinite."""
        linear, square = self.token_s + self.pair_s * start, self.pair_s / 2
        if seconds <= 0:
            return 0.0
        if square == 0:
            return seconds / linear if linear else math.inf
        return (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)


def num_pairs(start: int, num_tokens: int) -> float:
    """(token, attended token) pairs of a chunk, causal attention."""
    return num_tokens * (start + num_tokens / 2)


@dataclass(frozen=True, slots=True)
class StepTime:
    """What is known about the duration of steps; None: nothing."""

    decode: DecodeTime | None = None
    prompt: PromptTime | None = None


@dataclass(slots=True)
class _Steps:
    """The last steps of a kind."""

    measured: deque[tuple[StepWork, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    num_unfitted: int = 0

    def note(self, work: StepWork, duration_s: float) -> bool:
        """Returns whether it is time to fit again: after each of the first steps, then once in a while."""
        self.measured.append((work, duration_s))
        self.num_unfitted += 1
        if len(self.measured) > _STEPS_PER_FIT and self.num_unfitted < _STEPS_PER_FIT:
            return False
        self.num_unfitted = 0
        return True


@dataclass(slots=True)
class StepTimeModel:
    """Notes steps and fits them."""

    fit: StepTime = field(default_factory=StepTime)
    _decode: _Steps = field(default_factory=_Steps)
    _prompt: _Steps = field(default_factory=_Steps)

    def note(self, work: StepWork, duration_s: float) -> None:
        """One more measured step."""
        if duration_s <= 0:
            return
        if work.num_prompt_tokens:
            if self._prompt.note(work, duration_s):
                self._publish(StepTime(self.fit.decode, self._fit_prompt(self.fit.decode)))
        elif self._decode.note(work, duration_s):
            self._publish(StepTime(self._fit_decode(), self.fit.prompt))

    def _publish(self, fit: StepTime) -> None:
        if (self.fit.decode is None, self.fit.prompt is None) != (fit.decode is None, fit.prompt is None):
            logger.debug("step times: %s", fit)
        self.fit = fit

    def _fit_decode(self) -> DecodeTime | None:
        rows: list[Row] = [(1.0, work.num_sequences, work.num_context_tokens) for work, _ in self._decode.measured]
        fit = _trusted_fit(rows, [duration_s for _, duration_s in self._decode.measured])
        return None if fit is None else DecodeTime(*_padded(fit))

    def _fit_prompt(self, decode: DecodeTime | None) -> PromptTime | None:
        """Fit what is left of mixed steps without the time of their decoding sequences; the overhead stays."""
        rows: list[Row] = []
        measured = []
        for work, duration_s in self._prompt.measured:
            if work.num_sequences and decode is None:
                continue
            decode_s = 0.0
            if decode is not None:
                decode_s = decode.seconds(work.num_sequences, work.num_context_tokens) - decode.overhead_s
            if duration_s > decode_s:
                rows.append((work.num_prompt_tokens, 1.0, work.num_prompt_pairs))
                measured.append(duration_s - decode_s)
        fit = _trusted_fit(rows, measured)
        if fit is None:
            return None
        token_s, overhead_s, pair_s = _padded(fit)
        return PromptTime(overhead_s, token_s, pair_s)


def _trusted_fit(rows: list[Row], measured: list[float]) -> LinearFit | None:
    if len(rows) < _MIN_STEPS:
        return None
    num_columns = min(len(rows[0]), 1 + len(rows) // _STEPS_PER_COLUMN)
    fit = fit_robustly([row[:num_columns] for row in rows], measured)
    is_trusted = fit.rms_error <= _MAX_ERROR and len(fit.errors) >= _MIN_KEPT_RATIO * len(rows)
    return fit if is_trusted else None


def _padded(fit: LinearFit) -> tuple[float, float, float]:
    first, second, third = (*fit.coefficients, 0.0, 0.0)[:3]
    return first, second, third
