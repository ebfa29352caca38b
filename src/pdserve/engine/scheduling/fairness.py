"""The scheduler's decisions as pure functions: which sequence comes first, has a right to half, or gives way.

Nothing here sees a block, a queue or a clock; `scheduler.py` asks and acts.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.sequence import Sequence


def has_aged(sequence: Sequence, now_s: float, max_wait_s: float) -> bool:
    """Whether it has been here so long that it goes before everything younger, whatever the priorities."""
    return now_s - sequence.arrival_s >= max_wait_s


def guaranteed_prompt(sequences: list[Sequence], now_s: float, max_wait_s: float) -> Sequence:
    """The sequence with a right to half of every step: the oldest aged one, else by priority, preempted, arrival.

    Each one that waits becomes it when all that came before are done, so none starves, whatever shorter ones arrive.
    """

    def rank(sequence: Sequence) -> tuple[bool, int, bool, float]:
        if has_aged(sequence, now_s, max_wait_s):
            return (False, 0, False, sequence.arrival_s)
        return (True, sequence.priority, sequence.num_preemptions == 0, sequence.arrival_s)

    return min(sequences, key=rank)


def prefill_order(sequences: list[Sequence], remaining_s: Callable[[Sequence], float]) -> list[Sequence]:
    """Sequences with a prompt to compute, first served first: by priority, preempted, least time left, arrival."""

    def rank(sequence: Sequence) -> tuple[int, bool, float, float]:
        return (sequence.priority, sequence.num_preemptions == 0, remaining_s(sequence), sequence.arrival_s)

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
        last_victim: preempted the time before; taken again only when `may_repeat` and no other yields a block.
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
