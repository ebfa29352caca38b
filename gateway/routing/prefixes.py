"""Which prompt prefixes this gateway has sent to which worker: a guess at their prefix caches, never a promise.

A prompt is a chain of hashes, one per span of a few blocks: hash i stands for spans 0..i and the tenant's salt.
The guess is bounded like the worker's own cache (LRU, as many tokens as the worker has), and corrected by what
workers report (`num_cached_tokens` in Started): a worker that caches less than guessed earns less credit.
Collisions cost a worse choice of worker, nothing else: workers verify identity themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pdserve.registration import WorkerRef

BLOCKS_PER_SPAN = 4
"""Fewer hashes per prompt: 32k tokens cost about a millisecond, and a guess is at most three blocks too low."""


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
