"""KV leases: the prefill worker's promise to keep a hand-off's blocks, and when that promise ends.

Pure: no thread, no blocks, no bus. Time is injected as two readings: a monotonic clock, and how long that clock
did not count, because the worker's own bus reader was disconnected and no renewal could arrive. The request's
deadline counts always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.messages import AttemptKey


@dataclass(slots=True)
class Lease:
    """The lease of one hand-off: two times at which it ends."""

    expires_at_s: float
    """On the lease clock, which stands still at times."""
    deadline_s: float
    """On the monotonic clock: the request's end, whatever the bus does."""


class LeaseTable:
    """Granted leases. Unknown, late and doubled notices change nothing.

    Args:
        lease_s: how long a lease lasts unless it is renewed.
        clock: monotonic seconds.
        stood_still_s: total seconds for which the lease clock did not run, a running pause included.
    """

    def __init__(
        self, lease_s: float, clock: Callable[[], float], stood_still_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        assert lease_s > 0, lease_s
        self.lease_s = lease_s
        self._clock = clock
        self._stood_still_s = stood_still_s
        self._leases: dict[AttemptKey, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._leases

    def grant(self, key: AttemptKey, deadline_s: float) -> None:
        """Start a lease, or renew the one that is there."""
        lease = self._leases.setdefault(key, Lease(0.0, deadline_s))
        lease.expires_at_s = self._now_s() + self.lease_s

    def renew(self, key: AttemptKey) -> bool:
        """A whole lease from now on. False: there is none (the decode worker is told `unknown`)."""
        lease = self._leases.get(key)
        if lease is None:
            return False
        lease.expires_at_s = self._now_s() + self.lease_s
        return True

    def release(self, key: AttemptKey) -> bool:
        """End a lease. False: it had ended before, and nothing must be unpinned again."""
        return self._leases.pop(key, None) is not None

    def expire(self) -> list[AttemptKey]:
        """End and return all leases whose time is over."""
        now_s, lease_now_s = self._clock(), self._now_s()
        ended = [
            key for key, lease in self._leases.items() if lease.expires_at_s <= lease_now_s or lease.deadline_s <= now_s
        ]
        for key in ended:
            del self._leases[key]
        return ended

    def _now_s(self) -> float:
        return self._clock() - self._stood_still_s()
