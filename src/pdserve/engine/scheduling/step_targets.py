"""How much a step may hold so that no sequence waits too long for its end: pure rules over the measured step time.

Prefill: a step of prompts takes about `prompt_step_s`, because a short prompt that arrives waits for its end.
Decode: a step takes at most `tpot_s`, the target for the time per output token: prompt chunks beside decoding
sequences are cut to what is left of it, and no further sequence joins when it would be exceeded.

Without a model, and where the target is out of reach even for a sequence alone, nothing is held back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.engine.scheduling.sharing import StepBudget
from pdserve.engine.scheduling.step_time import DecodeTime, StepTime, StepWork

_EFFICIENT_TOKENS = 128
"""Rows from which matrix products run at full speed on a CPU: a step of prompts may always hold so many."""
_MIN_PROMPT_SHARE = 0.5
"""Share of the decode time that prompts get beside sequences that exceed their target already: they never stop."""


@dataclass(frozen=True, slots=True)
class StepTargets:
    """How long the steps of a role may take; None: as long as they take."""

    prompt_step_s: float | None = None
    """Target for the duration of a step that computes prompts."""
    tpot_s: float | None = None
    """Target for the duration of a step in which sequences decode."""


def prompt_budget(targets: StepTargets, time: StepTime, decodes: StepWork, num_tokens: int) -> StepBudget:
    """What the prompts of a step may use.

    Args:
        targets: those of the role.
        time: durations as measured.
        decodes: the step's decoding sequences.
        num_tokens: tokens that the step has left.
    """
    if time.prompt is None:
        return StepBudget(num_tokens)
    seconds = math.inf
    if targets.prompt_step_s is not None:
        efficient_s = time.prompt.seconds(0, _EFFICIENT_TOKENS)
        seconds = max(targets.prompt_step_s - time.prompt.overhead_s, efficient_s)
    if targets.tpot_s is not None and time.decode is not None and decodes.num_sequences:
        decode_s = time.decode.seconds(decodes.num_sequences, decodes.num_context_tokens)
        overhead_s = max(0.0, time.prompt.overhead_s - time.decode.overhead_s)
        seconds = min(seconds, max(targets.tpot_s - decode_s - overhead_s, _MIN_PROMPT_SHARE * decode_s))
    return StepBudget(num_tokens, seconds, time.prompt)


def num_admissible(
    targets: StepTargets, time: DecodeTime | None, decode_batch: StepWork, num_context_tokens: float
) -> float:
    """How many more sequences of this context length can decode in a step within the target; a fraction, or infinite.

    At least one when none decodes yet, and without limit where even one alone exceeds the target.
    """
    if targets.tpot_s is None or time is None or time.seconds(1, int(num_context_tokens)) > targets.tpot_s:
        return math.inf
    left_s = targets.tpot_s - time.seconds(decode_batch.num_sequences, decode_batch.num_context_tokens)
    each_s = time.sequence_s + time.context_s * num_context_tokens
    if each_s == 0:
        return math.inf if left_s >= 0 else 0.0
    return max(0.0, left_s / each_s, 0.0 if decode_batch.num_sequences else 1.0)
