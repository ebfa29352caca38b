"""Divides what a step may hold among prompts. Pure: positions and numbers of tokens in, numbers of tokens out.

The guaranteed prompt has a right to half, so that a long one advances whatever shorter ones arrive; the others are
served in their order, least remaining time first, so that short ones do not wait for long ones.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pdserve.engine.scheduling.step_time import PromptTime

_MIN_CHUNK_TOKENS = 16
"""The guaranteed prompt's chunk is never cut below this, because each chunk has a price of its own."""
_NO_TIME = PromptTime(0.0, 0.0, 0.0)


@dataclass(slots=True)
class StepBudget:
    """What the prompts of one step may still use."""

    num_tokens: int
    seconds: float = math.inf
    time: PromptTime = _NO_TIME

    @property
    def is_timed(self) -> bool:
        """Whether seconds count, and not tokens alone."""
        return self.seconds < math.inf

    def half(self) -> StepBudget:
        """A budget of half as much, which is spent apart from this one."""
        return StepBudget(max(1, self.num_tokens // 2) if self.num_tokens else 0, self.seconds / 2, self.time)

    def spend(self, start: int, num_wanted: int, *, at_least: int = 0) -> int:
        """Take as many of these tokens, from position `start` on, as fit; `at_least` so many even when time is over."""
        within_s = self.time.num_tokens_within(start, self.seconds) if self.is_timed else math.inf
        num_tokens = min(num_wanted, self.num_tokens, num_wanted if within_s >= num_wanted else int(within_s))
        num_tokens = max(num_tokens, min(at_least, num_wanted, self.num_tokens))
        self.charge(start, num_tokens)
        return num_tokens

    def charge(self, start: int, num_tokens: int) -> None:
        """Take off tokens, from position `start` on, that were spent elsewhere."""
        self.num_tokens -= num_tokens
        self.seconds -= self.time.seconds(start, num_tokens)


def share_budget(prompts: list[tuple[int, int]], budget: StepBudget, guaranteed: int) -> list[int]:
    """Divide a step among prompts. The guaranteed prompt has half for itself, so that it always advances.

    The rest goes to the first ones that can use it, the guaranteed prompt in its place among them.

    Args:
        prompts: (position of the next token, uncomputed tokens) of each; those to serve first come first.
        budget: what there is; spent here.
        guaranteed: index of the prompt with a right to half.

    Returns:
        Tokens granted to each.
    """
    grants = [0] * len(prompts)
    if prompts:
        start, num_wanted = prompts[guaranteed]
        grants[guaranteed] = budget.half().spend(start, num_wanted, at_least=_MIN_CHUNK_TOKENS)
        budget.charge(start, grants[guaranteed])
    for index, (start, num_wanted) in enumerate(prompts):
        granted = grants[index]
        grants[index] += budget.spend(start + granted, num_wanted - granted)
    return grants


def share_or_sit_out(prompts: list[tuple[int, int]], budget: StepBudget, guaranteed: int) -> tuple[bool, list[int]]:
    """Like `share_budget`, but the guaranteed prompt sits out a step that gives others their first token, if it could
    not end in it.

    Both in one step would let those others wait for its chunk. Without it their step is at most half as long.

    Returns:
        Whether the guaranteed prompt sits out; tokens granted to each.
    """
    grants = share_budget(prompts, dataclasses.replace(budget), guaranteed)
    if not budget.is_timed or grants[guaranteed] == prompts[guaranteed][1]:
        return False, grants
    others = [(start, 0 if index == guaranteed else num_wanted) for index, (start, num_wanted) in enumerate(prompts)]
    without = share_budget(others, budget.half(), guaranteed)
    does_one_end = any(0 < granted == num_wanted for granted, (_, num_wanted) in zip(without, others, strict=True))
    return (True, without) if does_one_end else (False, grants)
