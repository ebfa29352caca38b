"""Which peers' transfers failed lately: for /metrics, /ready and routing. A mark fades and never blocks a transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef

_PEER_REASONS = frozenset(TransferReason) - {
    TransferReason.LOOKUP,
    TransferReason.ABORTED,
    TransferReason.GEOMETRY,
    TransferReason.NONCE,
    TransferReason.OTHER,
}
"""Failures that say something about the way to a peer."""
FAILURE_TTL_S = 10.0
"""How long a worker shows a peer's failure mark."""


@dataclass(frozen=True, slots=True)
class FailureMark:
    """A peer's failures since its last success."""

    num_failures: int
    reason: TransferReason
    """Why the last transfer failed."""
    at_s: float


class PeerFailures:
    """Marks per peer that fade after `ttl_s`, or with the next success. Any thread may ask."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._lock = threading.Lock()
        self._marks: dict[WorkerRef, FailureMark] = {}
        self.num_in_a_row = 0
        """Failures since the last success with any peer: a worker with many of them is not ready."""

    def note_success(self, peer: WorkerRef) -> None:
        """A transfer from this peer worked."""
        with self._lock:
            self._marks.pop(peer, None)
            self.num_in_a_row = 0

    def note_failure(self, peer: WorkerRef, reason: TransferReason) -> None:
        """A transfer failed; reasons that lie elsewhere (aborted, geometry, …) leave no mark."""
        if reason not in _PEER_REASONS:
            return
        with self._lock:
            self._forget_old()
            before = self._marks.get(peer)
            num_failures = before.num_failures + 1 if before else 1
            self._marks[peer] = FailureMark(num_failures, reason, self._clock())
            self.num_in_a_row += 1

    def marks(self) -> dict[WorkerRef, FailureMark]:
        """Peers whose last transfer failed within the TTL."""
        with self._lock:
            self._forget_old()
            return dict(self._marks)

    def _forget_old(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        self._marks = {peer: mark for peer, mark in self._marks.items() if mark.at_s > oldest_s}
