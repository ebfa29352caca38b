"""Which worker: candidates by identity, then the better of two random ones by cost. Pure; randomness is injected.

Cost of a P, in seconds until the prompt is computed: (its queue + own uncached tokens) / its rate.
Cost of a D, in seconds per step once the sequence is there: its step time, scaled by the growth of its batch, and
weighted by how much of its free KV the sequence takes.
Ties go to the same node, then the same zone. A worker whose job or hand-off just failed is avoided for a while,
but only while there is another one: marks always expire by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.registration import Role, WorkerRef, WorkerRegistration, WorkerState

BATCH_AT_TWICE_THE_STEP = 16
"""A decode step is memory-bound: it takes about twice the time only when this many sequences join."""

UNMEASURED_TOKENS_PER_S = 1_000.0
"""Stands in while no prefill worker has measured its rate; only comparisons depend on it."""


Pairs = tuple[list[WorkerRegistration], list[WorkerRegistration]]
"""(prefill, decode)"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is, for ties."""

    node: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What the cost of one P for one prompt is made of."""

    num_queued_tokens: int
    """In the worker's queue, own jobs included that it has not reported yet."""
    num_uncached_tokens: int
    """Of this prompt."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What the cost of one D for one sequence is made of."""

    num_sequences: int
    """Running and waiting there, own ones included that it has not reported yet."""
    num_free_blocks: int
    num_needed_blocks: int


class Router:
    """Chooses among registrations of one model."""

    def __init__(
        self, fingerprint: str, *, rng: random.Random, place: Place | None = None, avoid_s: float = 5.0
    ) -> None:
        self._fingerprint, self._rng, self._avoid_s = fingerprint, rng, avoid_s
        self._place = place or Place()
        self._paired: tuple[Mapping[str, WorkerRegistration], Pairs] | None = None
        self._avoided_until_s: dict[tuple[WorkerRef, WorkerRef | None], float] = {}

    # --- candidates

    def ready(self, workers: Mapping[str, WorkerRegistration], role: Role) -> list[WorkerRegistration]:
        """Workers of this model and role that take new work."""
        return [
            worker
            for worker in workers.values()
            if worker.role is role and worker.state is WorkerState.READY and worker.fingerprint == self._fingerprint
        ]

    def pairs(self, workers: Mapping[str, WorkerRegistration]) -> Pairs:
        """(prefill, decode) workers that have a partner of equal KV signature.

        Remembered until another mapping comes: a registry view makes a new one with every poll.
        """
        if self._paired is None or self._paired[0] is not workers:
            self._paired = workers, self._pair(workers)
        return self._paired[1]

    def _pair(self, workers: Mapping[str, WorkerRegistration]) -> Pairs:
        prefill, decode = self.ready(workers, Role.PREFILL), self.ready(workers, Role.DECODE)
        shared = {worker.kv_signature for worker in prefill} & {worker.kv_signature for worker in decode}
        return (
            [worker for worker in prefill if worker.kv_signature in shared],
            [worker for worker in decode if worker.kv_signature in shared],
        )

    # --- marks

    def avoid(self, worker: WorkerRef, peer: WorkerRef | None, now_s: float) -> None:
        """Prefer others for a while; with `peer`, only in hand-offs with it."""
        self._avoided_until_s = {mark: until_s for mark, until_s in self._avoided_until_s.items() if until_s > now_s}
        self._avoided_until_s[worker, peer] = now_s + self._avoid_s

    def is_avoided(self, worker: WorkerRef, peer: WorkerRef | None, now_s: float) -> bool:
        """Whether a mark for this worker, alone or with this peer, is still in force."""
        marks = self._avoided_until_s
        return marks.get((worker, None), now_s) > now_s or marks.get((worker, peer), now_s) > now_s

    # --- choices

    def choose_prefill(
        self,
        candidates: Sequence[WorkerRegistration],
        load_of: Callable[[WorkerRegistration], PrefillLoad],
        now_s: float,
    ) -> WorkerRegistration | None:
        """The P with the lower expected time to token 0 among two random ones and those with the prefix cached."""
        usable = self._unavoided(candidates, None, now_s)
        loads = {worker.worker_id: load_of(worker) for worker in usable}
        fewest = min((load.num_uncached_tokens for load in loads.values()), default=0)
        most = max((load.num_uncached_tokens for load in loads.values()), default=0)
        cached = [worker for worker in usable if loads[worker.worker_id].num_uncached_tokens == fewest < most]
        fallback_rate = _mean(worker.load.tokens_per_s for worker in usable) or UNMEASURED_TOKENS_PER_S

        def cost_s(worker: WorkerRegistration) -> float:
            load = loads[worker.worker_id]
            rate = worker.load.tokens_per_s or fallback_rate
            return (load.num_queued_tokens + load.num_uncached_tokens) / rate

        return self._best([*self._two_of(usable), *cached], cost_s, self._place)

    def choose_decode(
        self,
        candidates: Sequence[WorkerRegistration],
        load_of: Callable[[WorkerRegistration], DecodeLoad],
        now_s: float,
        prefill: WorkerRegistration | None,
    ) -> WorkerRegistration | None:
        """The D with the lower expected step time among two random ones; near `prefill`, if any, when equal."""
        usable = self._unavoided(candidates, prefill.ref if prefill is not None else None, now_s)
        fallback_s = _mean(worker.load.step_s for worker in usable) or 1.0

        def cost_s(worker: WorkerRegistration) -> float:
            load = load_of(worker)
            growth = 1 + load.num_sequences / BATCH_AT_TWICE_THE_STEP
            fill = load.num_needed_blocks / max(1, load.num_free_blocks)
            return (worker.load.step_s or fallback_s) * growth * (1 + fill)

        place = Place(prefill.node, prefill.zone) if prefill is not None else self._place
        return self._best(self._two_of(usable), cost_s, place)

    def _unavoided(
        self, candidates: Sequence[WorkerRegistration], peer: WorkerRef | None, now_s: float
    ) -> Sequence[WorkerRegistration]:
        usable = [worker for worker in candidates if not self.is_avoided(worker.ref, peer, now_s)]
        return usable or candidates

    def _two_of(self, candidates: Sequence[WorkerRegistration]) -> list[WorkerRegistration]:
        return list(candidates) if len(candidates) <= 2 else self._rng.sample(candidates, 2)

    def _best(
        self,
        candidates: Collection[WorkerRegistration],
        cost_s: Callable[[WorkerRegistration], float],
        place: Place,
    ) -> WorkerRegistration | None:
        def rank(worker: WorkerRegistration) -> tuple[float, bool, bool, float]:
            is_elsewhere = bool(place.node) and worker.node != place.node
            is_far = bool(place.zone) and worker.zone != place.zone
            return float(f"{cost_s(worker):.2g}"), is_elsewhere, is_far, self._rng.random()

        return min(candidates, key=rank, default=None)


def _mean(values: Iterable[float]) -> float:
    """Mean of the measured (non-zero) values; 0 when there is none."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else 0.0
