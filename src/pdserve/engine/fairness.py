"""The scheduler's decisions as pure functions: who comes first, who gets which share, who gives way.

Nothing here sees a block, a queue or a clock; `scheduler.py` asks and acts.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.sequence import Sequence


def has_aged(sequence: Sequence, now_s: float, max_wait_s: float) -> bool:
    """Whether it has been here so long that it goes before everything younger, whatever the priorities."""
    return now_s - sequence.arrival_s >= max_wait_s


def prefill_order(sequences: list[Sequence], now_s: float, max_wait_s: float) -> list[Sequence]:
    """Sequences with a prompt to compute, first served first.

    Aged ones by arrival, then by priority; within a priority preempted ones, then by arrival.
    """

    def rank(sequence: Sequence) -> tuple[bool, int, bool, float]:
        if has_aged(sequence, now_s, max_wait_s):
            return (False, 0, False, sequence.arrival_s)
        return (True, sequence.priority, sequence.num_preemptions == 0, sequence.arrival_s)

    return sorted(sequences, key=rank)


def protection_order(running: list[Sequence]) -> list[Sequence]:
    """Running sequences, best protected first: the oldest, then by priority, then as admitted.

    The first one is never preempted. It fits into the pool alone (checked on arrival), so it finishes, then the
    next oldest does, and so on: that is why a pool under pressure always makes progress.
    """
    if not running:
        return []
    oldest = min(running, key=lambda sequence: sequence.arrival_s)
    return [oldest, *sorted((s for s in running if s is not oldest), key=lambda sequence: sequence.priority)]


def choose_victim(
    candidates: list[Sequence],
    last_victim: Sequence | None,
    num_yielded: Callable[[Sequence], int],
    *,
    may_repeat: bool,
) -> Sequence | None:
    """The sequence to preempt, of those that rank after the one in need.

    Args:
        candidates: in protection order.
        last_victim: preempted the time before; taken again only when `may_repeat` and nobody else yields.
        num_yielded: blocks that a sequence's preemption would make available now; without any it is no victim.
        may_repeat: the one in need is the oldest, whose progress must not wait.
    """
    repeated = None
    for sequence in reversed(candidates):
        if num_yielded(sequence) == 0:
            continue
        if sequence is not last_victim:
            return sequence
        repeated = sequence
    return repeated if may_repeat else None


def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Divide a step's tokens among prompts, in the order given.

    A prompt longer than half of the budget is *long*. The first long one gets half, so that it always advances;
    further long ones wait while short ones are served; what is left goes to the first that can use it.

    Args:
        wanted: uncomputed tokens of each prompt.
        budget: tokens to give away.

    Returns:
        Tokens granted to each; their sum is min(budget, sum(wanted)).
    """
    half = max(1, budget // 2)
    grants = [0] * len(wanted)
    left, has_long = budget, False
    for index, tokens in enumerate(wanted):
        if tokens > half and has_long:
            continue
        has_long |= tokens > half
        grants[index] = min(tokens, half, left)
        left -= grants[index]
    for index, tokens in enumerate(wanted):
        extra = min(tokens - grants[index], left)
        grants[index] += extra
        left -= extra
    return grants
