"""Which peers' transfers failed lately, for /ready. A mark fades, and it never blocks a transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
"""How long a failure counts against its peer."""


class PeerFailures:
    """Marks per peer that fade after `ttl_s`, or with the next success. Any thread may ask."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._lock = threading.Lock()
        self._failed_at_s: dict[WorkerRef, float] = {}
        self.num_in_a_row = 0
        """Failures since the last success with any peer: a worker with many of them is not ready."""

    def note_success(self, peer: WorkerRef) -> None:
        """A transfer from this peer worked."""
        with self._lock:
            self._failed_at_s.pop(peer, None)
            self.num_in_a_row = 0

    def note_failure(self, peer: WorkerRef, reason: TransferReason) -> None:
        """A transfer failed; reasons that lie elsewhere (aborted, geometry, …) leave no mark."""
        if reason not in _PEER_REASONS:
            return
        with self._lock:
            self._forget_old()
            self._failed_at_s[peer] = self._clock()
            self.num_in_a_row += 1

    def peers(self) -> frozenset[WorkerRef]:
        """Peers whose last transfer failed within the TTL."""
        with self._lock:
            self._forget_old()
            return frozenset(self._failed_at_s)

    def _forget_old(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        self._failed_at_s = {peer: at_s for peer, at_s in self._failed_at_s.items() if at_s > oldest_s}
