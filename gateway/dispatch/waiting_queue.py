"""Requests wait here, in the gateway: a bounded queue in the order in which they shall go. Pure.

Order: re-dispatches first (somebody already reads their tokens), then by priority with ageing. Ageing is linear,
so the order of two entries never changes while they wait: one priority level weighs as much as `ageing_s`
of waiting, which makes starvation impossible and a heap sufficient.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """Something that waits: a new request with all its choices, or one sequence that lost its workers."""

    item: T
    num_tokens: int
    """Prompt tokens to compute, at most."""
    queued_s: float
    priority: int = 0
    is_redispatch: bool = False
    not_before_s: float = float("-inf")
    """Back-off of a re-dispatch."""
    no_pair_since_s: float | None = None
    """Since when no pair of workers is there for it."""
    rank: tuple[int, float, int] = field(default=(0, 0.0, 0))
    """Set by the queue."""


class WaitingQueue(Generic[T]):
    """Ordered by rank; counts requests and tokens of new requests for the door."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._entries: list[QueueEntry[T]] = []
        self._numbers = itertools.count()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        """In the order of dispatch, over a snapshot: entries may be removed meanwhile."""
        return iter(tuple(self._entries))

    def push(self, entry: QueueEntry[T]) -> None:
        """Queue an entry at its place."""
        due_s = entry.queued_s + entry.priority * self._ageing_s
        entry.rank = (0 if entry.is_redispatch else 1, due_s, next(self._numbers))
        bisect.insort(self._entries, entry, key=_rank)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: QueueEntry[T]) -> None:
        """Take an entry out; it must be queued."""
        index = bisect.bisect_left(self._entries, entry.rank, key=_rank)
        assert index < len(self._entries), f"entry {entry.rank} is not queued"
        assert self._entries[index] is entry, f"entry {entry.rank} is not queued"
        del self._entries[index]
        self.num_tokens -= entry.num_tokens


def _rank(entry: QueueEntry[T]) -> tuple[int, float, int]:
    return entry.rank
