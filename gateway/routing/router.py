"""Which worker: candidates by identity and pins, then the better of two random ones by cost.

Pure; randomness is injected. Cost of a prefill worker, in seconds until the prompt is computed: (its queue + own
uncached tokens) / its rate. Cost of a decode worker, in seconds per step once the sequence is there: its step time,
scaled by the growth of its batch, and weighted by how much of its free KV the sequence takes.
Ties go to the same node, then the same zone. A worker whose job or hand-off just failed is avoided for a while,
but only while there is another one: marks always expire by themselves.

Which prompt prefixes a worker has cached is a guess, never a promise: what this gateway has sent there, bounded like
the worker's own cache (LRU, as many tokens as the worker has) and corrected by what workers report
(`num_cached_tokens` in Started): a worker that caches less than guessed earns less credit. A prompt is a chain of
hashes, one per span of a few blocks: hash i stands for spans 0..i and the tenant's salt. Collisions cost a worse
choice of worker, nothing else: workers verify identity themselves.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdserve.gateway.generation.request import GenerationRequest
from pdserve.ids import Fingerprint, WorkerId
from pdserve.registration import Role, WorkerRef, WorkerRegistration, WorkerState

BATCH_AT_TWICE_THE_STEP = 16
"""A decode step is memory-bound: it takes about twice the time only when this many sequences join."""

UNMEASURED_TOKENS_PER_S = 1_000.0
"""Stands in while no prefill worker has measured its rate; only comparisons depend on it."""

BLOCKS_PER_SPAN = 4
"""Fewer hashes per prompt: 32k tokens cost about a millisecond, and a guess is at most three blocks too low."""

Workers = Mapping[WorkerId, WorkerRegistration]
Pairs = tuple[list[WorkerRegistration], list[WorkerRegistration]]
"""Two lists of workers: (prefill, decode)."""

Mode = Literal["auto", "always", "never"]
"""always: a prefill worker computes every prompt; never: no prefill worker is needed; auto: short prompts alone are
computed where they are decoded."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Who computes a prompt (settings DISAGGREGATION and MIN_REMOTE_TOKENS): one of the two roles, never both."""

    mode: Mode = "auto"
    min_remote_tokens: int = 0
    """With auto: prompts with fewer tokens cost less to compute than to hand over. 0: none does."""

    @property
    def needs_pairs(self) -> bool:
        """Whether some prompt may need a prefill worker."""
        return self.mode != "never"

    def is_local(self, request: GenerationRequest) -> bool:
        """Whether the decode worker computes this prompt itself. One output token alone is never decoded."""
        if self.mode != "auto":
            return self.mode == "never"
        is_short = len(request.prompt_token_ids) < self.min_remote_tokens
        return is_short and request.sampling.max_tokens > 1 and request.pinned_prefill is None


@dataclass(slots=True, eq=False)
class Demand:
    """What one dispatch of a request asks of workers: all its choices together at first, later one of them alone."""

    request: GenerationRequest
    is_local: bool
    """No hand-off: the decode worker computes the prompt itself."""
    output: list[int] | None = None
    """Tokens that the one sequence has emitted; None: the first dispatch, of all choices."""
    _hashes: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute: the prompt, and what was emitted."""
        return len(self.request.prompt_token_ids) + len(self.output or ())

    @property
    def num_choices(self) -> int:
        """Sequences that go out together."""
        return self.request.n if self.output is None else 1

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's log-probabilities are wanted: it is computed as a whole, whatever is cached."""
        return self.request.num_scored_tokens > 0 and not self.output

    @property
    def is_pin_strict(self) -> bool:
        """First dispatch: the pinned pair or none. Later: the pinned pair if it is there."""
        return self.output is None

    def hashes(self, block_size: int) -> list[int]:
        """Prefix hashes of what is to be computed, made once per block size."""
        if block_size not in self._hashes:
            token_ids = self.request.prompt_token_ids + (self.output or [])
            self._hashes[block_size] = prefix_hashes(token_ids, BLOCKS_PER_SPAN * block_size, self.request.cache_salt)
        return self._hashes[block_size]

    def num_decode_blocks(self, block_size: int) -> int:
        """Blocks that a decode worker reserves per choice: the prompt's plus one."""
        will_decode = self.request.num_left(len(self.output or ())) > 1
        return -(-self.num_tokens // block_size) + 1 if will_decode or self.is_local else 0

    def allowed_pairs(self, pairs: Pairs) -> Pairs:
        """The workers that the pins allow; loose pins allow all when the pinned ones are not there."""
        request, (prefill, decode) = self.request, pairs
        if request.pinned_prefill is None and request.pinned_decode is None:
            return pairs
        only_decode = [worker for worker in decode if request.pinned_decode in (None, worker.worker_id)]
        signatures = {worker.kv_signature for worker in only_decode}
        only_prefill = [
            worker
            for worker in prefill
            if request.pinned_prefill in (None, worker.worker_id) and worker.kv_signature in signatures
        ]
        if only_prefill and only_decode:
            return only_prefill, only_decode
        return ([], []) if self.is_pin_strict else pairs

    def allowed_decode(self, decode: list[WorkerRegistration]) -> list[WorkerRegistration]:
        """The same for a prompt that its decode worker computes."""
        pinned = self.request.pinned_decode
        only = [worker for worker in decode if pinned in (None, worker.worker_id)]
        return only if only or self.is_pin_strict else decode


def prefix_hashes(token_ids: list[int], span_tokens: int, cache_salt: str) -> list[int]:
    """Chained hash of every full span that leaves at least one token to compute."""
    hashes: list[int] = []
    parent = hash(cache_salt)
    for start in range(0, len(token_ids) - span_tokens, span_tokens):
        parent = hash((parent, tuple(token_ids[start : start + span_tokens])))
        hashes.append(parent)
    return hashes


@dataclass(slots=True)
class WorkerPrefixes:
    """What one worker probably has."""

    max_spans: int
    hashes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    credit: float = 1.0
    """Reported over guessed cache hits, smoothed."""


class PrefixMemory:
    """The guess for all workers."""

    def __init__(self, max_spans: int = 16_384, smoothing: float = 0.5) -> None:
        self._max_spans, self._smoothing = max_spans, smoothing
        self._workers: dict[WorkerRef, WorkerPrefixes] = {}

    def num_hit_spans(self, worker: WorkerRef, hashes: list[int]) -> int:
        """Leading spans that were sent there and not forgotten since."""
        prefixes = self._workers.get(worker)
        if prefixes is None:
            return 0
        for index, value in enumerate(hashes):
            if value not in prefixes.hashes:
                return index
        return len(hashes)

    def credit(self, worker: WorkerRef) -> float:
        """How far guesses about this worker have come true, 0..1."""
        prefixes = self._workers.get(worker)
        return prefixes.credit if prefixes else 1.0

    def note_sent(self, worker: WorkerRef, hashes: list[int], num_spans: int) -> None:
        """The worker will have these spans; it can hold `num_spans` in all."""
        bound = max(1, min(self._max_spans, num_spans))
        prefixes = self._workers.setdefault(worker, WorkerPrefixes(bound))
        prefixes.max_spans = bound
        for value in hashes:
            prefixes.hashes[value] = None
            prefixes.hashes.move_to_end(value)
        while len(prefixes.hashes) > prefixes.max_spans:
            prefixes.hashes.popitem(last=False)

    def note_reported(self, worker: WorkerRef, num_guessed_tokens: int, num_cached_tokens: int) -> None:
        """The worker began a prompt and said how much of it was cached."""
        prefixes = self._workers.get(worker)
        if prefixes is not None and num_guessed_tokens > 0:
            ratio = min(1.0, num_cached_tokens / num_guessed_tokens)
            prefixes.credit += self._smoothing * (ratio - prefixes.credit)

    def forget(self, worker: WorkerRef) -> None:
        """The worker is gone, and its cache with it."""
        self._workers.pop(worker, None)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What the cost of one prefill worker for one prompt is made of."""

    num_queued_tokens: int
    """Tokens in the worker's queue, own jobs included that it has not reported yet."""
    num_uncached_tokens: int
    """Tokens of this prompt that the worker has to compute."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What the cost of one decode worker for one sequence is made of."""

    num_sequences: int
    """Running and waiting there, own ones included that it has not reported yet."""
    num_free_blocks: int
    num_needed_blocks: int


class Router:
    """Chooses among registrations of one model."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        disaggregation: Disaggregation,
        *,
        rng: random.Random | None = None,
        avoid_s: float = 5.0,
    ) -> None:
        self.disaggregation = disaggregation
        self.prefixes = PrefixMemory()
        self._fingerprint, self._avoid_s = fingerprint, avoid_s
        self._rng = rng or random.Random()
        self._paired: tuple[Workers, Pairs] | None = None
        self._avoided_until_s: dict[tuple[WorkerRef, WorkerRef | None], float] = {}

    # --- candidates

    def ready(self, workers: Workers, role: Role) -> list[WorkerRegistration]:
        """Workers of this model and role that take new work."""
        return [
            worker
            for worker in workers.values()
            if worker.role is role and worker.state is WorkerState.READY and worker.fingerprint == self._fingerprint
        ]

    def pairs(self, workers: Workers) -> Pairs:
        """(prefill, decode) workers that have a partner of equal KV signature.

        Remembered until another mapping comes: a registry view makes a new one with every poll.
        """
        if self._paired is None or self._paired[0] is not workers:
            self._paired = workers, self._pair(workers)
        return self._paired[1]

    def usable(self, workers: Workers) -> Pairs:
        """(prefill, decode) workers that requests are sent to; without disaggregation prefill workers are none."""
        return self.pairs(workers) if self.disaggregation.needs_pairs else ([], self.ready(workers, Role.DECODE))

    def _pair(self, workers: Workers) -> Pairs:
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
        """The lower expected time to token 0 among two random workers and those with the prefix cached."""
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

        return self._best([*self._two_of(usable), *cached], cost_s, None)

    def choose_decode(
        self,
        candidates: Sequence[WorkerRegistration],
        load_of: Callable[[WorkerRegistration], DecodeLoad],
        now_s: float,
        prefill: WorkerRegistration | None,
    ) -> WorkerRegistration | None:
        """The lower expected step time among two random workers; near `prefill`, if any, when equal."""
        usable = self._unavoided(candidates, prefill.ref if prefill is not None else None, now_s)
        fallback_s = _mean(worker.load.step_s for worker in usable) or 1.0

        def cost_s(worker: WorkerRegistration) -> float:
            load = load_of(worker)
            growth = 1 + load.num_sequences / BATCH_AT_TWICE_THE_STEP
            fill = load.num_needed_blocks / max(1, load.num_free_blocks)
            return (worker.load.step_s or fallback_s) * growth * (1 + fill)

        return self._best(self._two_of(usable), cost_s, prefill)

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
        near: WorkerRegistration | None,
    ) -> WorkerRegistration | None:
        def rank(worker: WorkerRegistration) -> tuple[float, bool, bool, float]:
            is_elsewhere = near is not None and bool(near.node) and worker.node != near.node
            is_far = near is not None and bool(near.zone) and worker.zone != near.zone
            return float(f"{cost_s(worker):.2g}"), is_elsewhere, is_far, self._rng.random()

        return min(candidates, key=rank, default=None)


def _mean(values: Iterable[float]) -> float:
    """Mean of the measured (non-zero) values; 0 when there is none."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else 0.0
