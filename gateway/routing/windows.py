"""What this gateway has outstanding at each worker, against the window that the worker grants to every gateway.

P grants prompt tokens, D grants KV blocks. A holding is *unsettled* until the worker's own load figures include
it, and *returned* when it ended while they still did: that is how the gateway corrects them between two
heartbeats. Pure: told about time, never about clocks or the bus.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from pdserve.registration import WorkerRef


@dataclass(slots=True)
class Holding:
    """One job's share of a worker's window."""

    amount: int
    sent_s: float
    is_settled: bool = False


@dataclass(slots=True)
class WorkerHoldings:
    """All holdings at one worker, with running sums."""

    by_key: dict[Hashable, Holding] = field(default_factory=dict)
    total: int = 0
    unsettled: int = 0
    num_unsettled: int = 0
    returned: int = 0


class Windows:
    """The ledger of one role. Amounts are prompt tokens (P) or KV blocks (D)."""

    def __init__(self, settle_after_s: float) -> None:
        self._settle_after_s = settle_after_s
        self._workers: dict[WorkerRef, WorkerHoldings] = {}

    def take(self, worker: WorkerRef, key: Hashable, amount: int, now_s: float) -> None:
        """A job went out; taking again under the same key replaces the holding."""
        self.release(worker, key)
        holdings = self._workers.setdefault(worker, WorkerHoldings())
        holdings.by_key[key] = Holding(amount, now_s)
        holdings.total += amount
        holdings.unsettled += amount
        holdings.num_unsettled += 1

    def release(self, worker: WorkerRef, key: Hashable) -> None:
        """The worker is done with the job; unknown: nothing."""
        holdings = self._workers.get(worker)
        holding = holdings.by_key.pop(key, None) if holdings is not None else None
        if holdings is None or holding is None:
            return
        holdings.total -= holding.amount
        if holding.is_settled:
            holdings.returned += holding.amount
        else:
            holdings.unsettled -= holding.amount
            holdings.num_unsettled -= 1

    def refresh(self, worker: WorkerRef, now_s: float) -> None:
        """A newer registration was read: it includes every job that had time to arrive before it was written."""
        holdings = self._workers.get(worker)
        if holdings is None:
            return
        holdings.returned = 0
        if not holdings.by_key:
            del self._workers[worker]
        elif holdings.num_unsettled:
            self._settle(holdings, now_s)

    def forget(self, worker: WorkerRef) -> None:
        """The worker is gone."""
        self._workers.pop(worker, None)

    def _settle(self, holdings: WorkerHoldings, now_s: float) -> None:
        for holding in holdings.by_key.values():
            if not holding.is_settled and now_s - holding.sent_s >= self._settle_after_s:
                holding.is_settled = True
                holdings.unsettled -= holding.amount
                holdings.num_unsettled -= 1

    def total(self, worker: WorkerRef) -> int:
        """Everything outstanding there."""
        holdings = self._workers.get(worker)
        return holdings.total if holdings else 0

    def unsettled(self, worker: WorkerRef) -> int:
        """What the worker's load figures do not include yet, less what they include no longer rightly."""
        holdings = self._workers.get(worker)
        return holdings.unsettled - holdings.returned if holdings else 0

    def num_unsettled(self, worker: WorkerRef) -> int:
        """How many jobs the worker's load figures do not include yet."""
        holdings = self._workers.get(worker)
        return holdings.num_unsettled if holdings else 0

    def has_any(self, worker: WorkerRef) -> bool:
        """Whether anything of ours is there: if not, one job always goes, however small the window."""
        holdings = self._workers.get(worker)
        return holdings is not None and bool(holdings.by_key)
