"""Where a prompt or a hand-off goes *now*, or why it has to wait: the router's choice within the workers' windows.

Prefill workers grant every gateway a window of prompt tokens, decode workers one of KV blocks. A holding is
*unsettled* until the worker's own load figures include it, and *returned* when it ended while they still did: that
is how the gateway corrects them between two heartbeats. A prompt goes out only when its prefill worker has room and
the decode pool can take what comes out of it, so that no KV blocks are held that no worker can fetch.
Pure apart from this ledger: told about time, never about clocks or the bus.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from pdserve.gateway.routing.router import (
    BLOCKS_PER_SPAN,
    DecodeLoad,
    Demand,
    PrefillLoad,
    Router,
    Workers,
)
from pdserve.registration import Role, WorkerRef, WorkerRegistration


class Wait(enum.Enum):
    """Why there is no choice now."""

    NO_PAIR = "no_pair"
    """No worker that this demand needs is ready."""
    NO_ROOM = "no_room"
    """The worker, or the whole decode pool, is full at the moment."""
    ALL_REFUSED = "all_refused"
    """Every decode worker there is had this attempt before."""


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
    """The ledger of one role. Amounts are prompt tokens (prefill) or KV blocks (decode)."""

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
        """All that is outstanding there."""
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


class Placement:
    """Knows what is outstanding where. Keys are attempts' sequences."""

    def __init__(self, router: Router, *, settle_after_s: float, is_inbox_full: Callable[[WorkerRef], bool]) -> None:
        self.router = router
        self.prefill_windows, self.decode_windows = Windows(settle_after_s), Windows(settle_after_s)
        self._is_inbox_full = is_inbox_full
        self._unbound: dict[Hashable, tuple[str, int]] = {}
        self._num_unbound_blocks: Counter[str] = Counter()

    def has_workers(self, demand: Demand, workers: Workers) -> bool:
        """Whether any worker could serve this demand, now or when there is room."""
        if demand.is_local:
            return bool(demand.allowed_decode(self.router.ready(workers, Role.DECODE)))
        return bool(demand.allowed_pairs(self.router.pairs(workers))[0])

    def computing(self, demand: Demand, workers: Workers) -> list[WorkerRegistration]:
        """Workers of the role that computes the prompt."""
        return self.router.ready(workers, Role.DECODE) if demand.is_local else self.router.pairs(workers)[0]

    def are_inboxes_full(self, workers: list[WorkerRegistration]) -> bool:
        """Whether all of these workers, and at least one, have as many messages waiting as the bus keeps for them."""
        return bool(workers) and all(self._is_inbox_full(worker.ref) for worker in workers)

    def num_outstanding_tokens(self, workers: list[WorkerRegistration]) -> int:
        """Prompt tokens of this gateway that these workers have and have not finished."""
        return sum(self.prefill_windows.total(worker.ref) for worker in workers)

    def most_guessed_tokens(self, demand: Demand, workers: list[WorkerRegistration]) -> int:
        """Prompt tokens that one of these workers probably has in its prefix cache."""
        return max((self.num_guessed_tokens(demand, worker) for worker in workers), default=0)

    # --- prompts

    def find_prefill(
        self, demand: Demand, workers: Workers, now_s: float, blocked: set[WorkerRef]
    ) -> WorkerRegistration | Wait:
        """The prefill worker for a prompt. `blocked`: workers that an entry further ahead waits for; extended here."""
        prefill, decode = demand.allowed_pairs(self.router.pairs(workers))
        if not prefill:
            return Wait.NO_PAIR
        roomy = {worker.kv_signature for worker in decode if self._has_decode_room(demand, worker.kv_signature, decode)}
        blocked.update(worker.ref for worker in prefill if worker.kv_signature not in roomy)
        candidates = [
            worker for worker in prefill if worker.kv_signature in roomy and not self._is_inbox_full(worker.ref)
        ]
        chosen = self.router.choose_prefill(candidates, lambda worker: self._prefill_load(demand, worker), now_s)
        if chosen is None:
            return Wait.NO_ROOM
        ref = chosen.ref
        if ref in blocked or not self._has_prefill_room(demand, chosen):
            blocked.add(ref)
            return Wait.NO_ROOM
        return chosen

    def find_local(
        self, demand: Demand, workers: Workers, now_s: float, blocked: set[WorkerRef]
    ) -> WorkerRegistration | Wait:
        """The decode worker that computes a prompt itself. `blocked`: as for `find_prefill`."""
        decode = demand.allowed_decode(self.router.ready(workers, Role.DECODE))
        if not decode:
            return Wait.NO_PAIR
        signatures = {worker.kv_signature for worker in decode}
        roomy = {signature for signature in signatures if self._has_decode_room(demand, signature, decode)}
        candidates = [worker for worker in self._with_room(demand, decode) if worker.kv_signature in roomy]
        free = [worker for worker in candidates if worker.ref not in blocked]
        chosen = self.router.choose_decode(free, lambda worker: self._decode_load(demand, worker), now_s, None)
        if chosen is None:
            blocked.update(worker.ref for worker in decode)
            return Wait.NO_ROOM
        return chosen

    def num_guessed_tokens(self, demand: Demand, worker: WorkerRegistration) -> int:
        """Prompt tokens that the worker probably has in its prefix cache, and need not compute."""
        if demand.is_scored:
            return 0
        hashes = demand.hashes(worker.block_size)
        return self.router.prefixes.num_hit_spans(worker.ref, hashes) * BLOCKS_PER_SPAN * worker.block_size

    def num_uncached_tokens(self, demand: Demand, worker: WorkerRegistration) -> int:
        """Prompt tokens that the worker would have to compute, as far as its guesses have come true."""
        guessed = self.num_guessed_tokens(demand, worker) * self.router.prefixes.credit(worker.ref)
        return max(1, demand.num_tokens - int(guessed))

    def take_prefill(self, key: Hashable, demand: Demand, worker: WorkerRegistration, now_s: float) -> None:
        """A PrefillJob goes out."""
        ref = worker.ref
        self.prefill_windows.take(ref, key, self.num_uncached_tokens(demand, worker), now_s)
        self.router.prefixes.note_sent(ref, demand.hashes(worker.block_size), worker.num_blocks // BLOCKS_PER_SPAN)
        self.release_unbound(key)
        num_blocks = demand.num_decode_blocks(worker.block_size)
        self._unbound[key] = (worker.kv_signature, num_blocks)
        self._num_unbound_blocks[worker.kv_signature] += num_blocks

    # --- hand-offs

    def find_decode(
        self,
        demand: Demand,
        workers: Workers,
        now_s: float,
        prefill: WorkerRegistration,
        refused: Collection[WorkerRef] = (),
    ) -> WorkerRegistration | Wait:
        """The decode worker for a hand-off from `prefill`."""
        ready = [w for w in self.router.ready(workers, Role.DECODE) if w.kv_signature == prefill.kv_signature]
        usable = [worker for worker in ready if worker.ref not in refused]
        if not usable:
            return Wait.ALL_REFUSED if ready else Wait.NO_PAIR
        pinned = [worker for worker in usable if worker.worker_id == demand.request.pinned_decode]
        candidates = self._with_room(demand, pinned or usable)
        chosen = self.router.choose_decode(candidates, lambda worker: self._decode_load(demand, worker), now_s, prefill)
        return chosen if chosen is not None else Wait.NO_ROOM

    def take_decode(self, key: Hashable, demand: Demand, worker: WorkerRegistration, now_s: float) -> None:
        """A DecodeJob goes out."""
        self.release_unbound(key)
        self.decode_windows.take(worker.ref, key, demand.num_decode_blocks(worker.block_size), now_s)

    def release_unbound(self, key: Hashable) -> None:
        """The sequence needs no decode worker any more, or has one."""
        kv_signature, num_blocks = self._unbound.pop(key, ("", 0))
        self._num_unbound_blocks[kv_signature] -= num_blocks

    def forget(self, worker: WorkerRef) -> None:
        """The worker is gone, with its queue and its cache."""
        self.router.prefixes.forget(worker)
        self.prefill_windows.forget(worker)
        self.decode_windows.forget(worker)

    def refresh(self, worker: WorkerRegistration, now_s: float) -> None:
        """A newer registration of this worker was read."""
        self.prefill_windows.refresh(worker.ref, now_s)
        self.decode_windows.refresh(worker.ref, now_s)

    # --- room

    def _has_prefill_room(self, demand: Demand, worker: WorkerRegistration) -> bool:
        ref = worker.ref
        if not self.prefill_windows.has_any(ref):
            return True
        return self.prefill_windows.total(ref) + self.num_uncached_tokens(demand, worker) <= worker.window

    def _has_decode_room(self, demand: Demand, kv_signature: str, decode: list[WorkerRegistration]) -> bool:
        """Whether the decode pool can take this prompt beside those whose decode worker is not chosen yet."""
        pool = [worker for worker in decode if worker.kv_signature == kv_signature]
        needed = demand.num_choices * demand.num_decode_blocks(pool[0].block_size)
        is_idle = not self._num_unbound_blocks[kv_signature] and not any(
            self.decode_windows.has_any(worker.ref) for worker in pool
        )
        num_free = sum(self._free_blocks(worker, demand) for worker in pool)
        return is_idle or not needed or self._num_unbound_blocks[kv_signature] + needed <= num_free

    def _with_room(self, demand: Demand, decode: list[WorkerRegistration]) -> list[WorkerRegistration]:
        """Those that can take one sequence of this demand now."""
        return [
            worker for worker in decode if self._free_blocks(worker, demand) > 0 and not self._is_inbox_full(worker.ref)
        ]

    def _free_blocks(self, worker: WorkerRegistration, demand: Demand) -> int:
        """Blocks that one sequence of this demand may use there; 0: it has to wait. An idle worker takes any one."""
        ref, needed = worker.ref, demand.num_decode_blocks(worker.block_size)
        num_free = worker.window - self.decode_windows.unsettled(ref)
        if not self.decode_windows.has_any(ref):
            num_free = max(num_free, needed, 1)
        return num_free if num_free >= max(needed, 1) else 0

    def _prefill_load(self, demand: Demand, worker: WorkerRegistration) -> PrefillLoad:
        return PrefillLoad(
            num_queued_tokens=max(0, worker.load.waiting_tokens + self.prefill_windows.unsettled(worker.ref)),
            num_uncached_tokens=self.num_uncached_tokens(demand, worker),
        )

    def _decode_load(self, demand: Demand, worker: WorkerRegistration) -> DecodeLoad:
        ref, load = worker.ref, worker.load
        return DecodeLoad(
            num_sequences=load.num_running + load.num_waiting + self.decode_windows.num_unsettled(ref),
            num_free_blocks=max(load.num_available_blocks, worker.window) - self.decode_windows.unsettled(ref),
            num_needed_blocks=demand.num_decode_blocks(worker.block_size),
        )
