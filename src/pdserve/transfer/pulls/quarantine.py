"""READs that were given up before they ended: their blocks may still be written, so no other sequence may have them.

Pure bookkeeping, touched by one transfer thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdserve.transfer.base import Handle
from pdserve.transfer.pulls.active_pull import ActivePull


@dataclass(frozen=True, slots=True)
class QuarantineLimits:
    """When a worker waits no longer for READs that were given up, and recreates the agent."""

    max_age_s: float = 20.0
    """How long such a READ may stay unended: two leases."""
    max_ratio: float = 0.1
    """Share of the block pool, over all transfer threads, that may be held back."""
    drain_s: float = 2.0
    """How long healthy READs may take to end before an agent is recreated or closed."""


DEFAULT_LIMITS = QuarantineLimits()


@dataclass(frozen=True, slots=True)
class _Entry:
    pull: ActivePull
    num_blocks: int
    since_s: float


class Quarantine:
    """READs of one transport that were given up and have not ended.

    Args:
        max_age_s: older ones want the agent recreated.
        max_blocks: more blocks than this want it, too.
        clock: monotonic seconds.
    """

    def __init__(self, max_age_s: float, max_blocks: float, clock: Callable[[], float]) -> None:
        self._max_age_s, self._max_blocks, self._clock = max_age_s, max_blocks, clock
        self._entries: dict[Handle, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._entries

    @property
    def num_blocks(self) -> int:
        """Blocks that are held back."""
        return sum(entry.num_blocks for entry in self._entries.values())

    @property
    def is_overdue(self) -> bool:
        """Whether waiting has become more expensive than recreating the agent."""
        if not self._entries:
            return False
        oldest_s = min(entry.since_s for entry in self._entries.values())
        return self._clock() - oldest_s >= self._max_age_s or self.num_blocks > self._max_blocks

    def add(self, handle: Handle, pull: ActivePull, num_blocks: int) -> None:
        """A READ was given up and is not terminal."""
        self._entries[handle] = _Entry(pull, num_blocks, self._clock())
        pull.num_unended_reads += 1

    def remove(self, handle: Handle) -> ActivePull:
        """A READ became terminal; returns the request it belonged to."""
        pull = self._entries.pop(handle).pull
        pull.num_unended_reads -= 1
        return pull

    def remove_all(self) -> Iterator[ActivePull]:
        """All READs became terminal by a fence."""
        for handle in list(self._entries):
            yield self.remove(handle)
