"""When the absence of a registration counts, as pure state: no clock, no socket.

A registration expires by itself after its time to live. That it is not there means its process is gone,
provided that we have been connected to the same server for at least that long: a server that has just
restarted knows no process yet. A process never seen before has that long from the first question about it.
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
"""What names a process: a worker with its generation, or a gateway's id."""

FORGET_AFTER_S = 900.0
"""No request lives longer than this after its worker is gone."""


@dataclass(slots=True)
class _Known:
    was_seen: bool
    missing_since_s: float | None


@dataclass(slots=True)
class Absence(Generic[K]):
    """Which processes are missing, seen from one process's polls."""

    run_id: str | None = None
    connected_since_s: float = 0.0
    """Start of the unbroken sequence of successful polls of this server."""
    polled_s: float = 0.0
    """Time of the last one."""
    _known: dict[K, _Known] = field(default_factory=dict)

    def polled(self, present: Set[K], run_id: str, now_s: float) -> None:
        """A poll succeeded: these processes are registered on this server."""
        if run_id != self.run_id:
            self.run_id, self.connected_since_s = run_id, now_s
            for known in self._known.values():
                known.missing_since_s = None
        self.polled_s = now_s
        for process in present:
            self._known[process] = _Known(was_seen=True, missing_since_s=None)
        for process in self._known.keys() - present:
            self._note_missing(process)

    def _note_missing(self, process: K) -> None:
        known = self._known[process]
        if known.missing_since_s is None:
            known.missing_since_s = self.polled_s
        elif self.polled_s - known.missing_since_s > FORGET_AFTER_S:
            del self._known[process]

    def failed(self) -> None:
        """A poll failed: the sequence is broken."""
        self.run_id = None

    def is_gone(self, process: K, ttl_s: float) -> bool:
        """Whether this very process is known to be gone."""
        known = self._known.setdefault(process, _Known(was_seen=False, missing_since_s=None))
        if self.run_id is None or known.missing_since_s is None:
            return False
        since_s = self.connected_since_s if known.was_seen else known.missing_since_s
        return self.polled_s - since_s >= ttl_s
