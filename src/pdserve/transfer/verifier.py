"""Compares received blocks with their digests in a thread of its own, so that the next READ is copied meanwhile.

Where that thread gets no processor, its owner does the work by itself when there is nothing else to do (`help`).
Both take a few blocks at a time, so that neither waits long for the other at the end. Reads blocks and never writes
one. A result that nobody waits for any more is simply dropped by its taker.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from pdserve.transfer.digest import block_digests
from pdserve.transfer.memory import bytes_view

_PART_BLOCKS, _PART_BYTES = 4, 2 << 20
"""At least so much is compared at a time: the digest walks four blocks side by side, and a call has its price."""
_POLL_S = 0.0001
"""About as long as a part takes: sleeping and being woken up would take as long again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict(Generic[T]):
    """What was found out about some blocks."""

    tag: T
    """The caller's own."""
    num_blocks: int
    num_wrong: int
    """Blocks whose content is not what was announced."""
    failure: str = ""
    """Why the blocks could not be compared at all."""


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """Blocks of one `begin`, compared in parts by whoever has time."""

    tag: T
    block_ids: list[int]
    digests: list[bytes]
    num_open: int
    """Blocks not compared yet."""
    num_wrong: int = 0
    failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Verifier(Generic[T]):
    """The thread starts when it is first needed.

    Args:
        kv_cache: `[num_blocks, …]`.
        on_verdict: called in that thread whenever it has made `take` tell something new.
    """

    def __init__(self, kv_cache: torch.Tensor, on_verdict: Callable[[], None]) -> None:
        self._kv_cache = kv_cache
        self._part_blocks = max(_PART_BLOCKS, _PART_BYTES // bytes_view(kv_cache).shape[1])
        self._is_on_cpu = kv_cache.device.type == "cpu"
        self._on_verdict = on_verdict
        self._waiting: queue.SimpleQueue[tuple[_Job[T], range] | None] = queue.SimpleQueue()
        self._verdicts: deque[Verdict[T]] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-verify", daemon=True)

    def begin(self, tag: T, block_ids: list[int], digests: list[bytes], *, is_last: bool = False) -> None:
        """Compare these blocks with their digests; `take` tells the result.

        Args:
            is_last: nothing is copied meanwhile. Then a few blocks are compared before this returns: to wake the
                thread, and to be woken up by it, would take longer.
        """
        count = len(block_ids)
        job = _Job(tag, block_ids, digests, count)
        if is_last and self._is_on_cpu and count <= self._part_blocks:
            self._compare(job, range(count))
            return
        if self._thread.ident is None:
            self._thread.start()
        for first in range(0, count, self._part_blocks):
            self._waiting.put((job, range(first, min(first + self._part_blocks, count))))

    def take(self) -> list[Verdict[T]]:
        """Verdicts since the last call."""
        return [self._verdicts.popleft() for _ in range(len(self._verdicts))]

    def help(self) -> bool:
        """Compare some of the blocks that wait longest in the calling thread; False when none wait."""
        try:
            part = self._waiting.get_nowait()
        except queue.Empty:
            return False
        if part is None:
            self._waiting.put(None)
            return False
        self._compare(*part)
        return True

    def wait_briefly(self) -> bool:
        """Whether `take` has something new, now or within a tenth of a millisecond; other threads run meanwhile."""
        until_s = time.monotonic() + _POLL_S
        while not self._verdicts and time.monotonic() < until_s:
            time.sleep(0)
        return bool(self._verdicts)

    def close(self) -> None:
        """Wait until no block is being read any more. Again: nothing."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (part := self._waiting.get()) is not None:
            if self._compare(*part):
                self._on_verdict()

    def _compare(self, job: _Job[T], indices: range) -> bool:
        """Compare a part of a job; whether that was the last one, which makes the verdict."""
        failure = ""
        try:
            found = block_digests(self._kv_cache, job.block_ids[indices.start : indices.stop])
        except Exception as error:  # whatever a device says: these blocks are not verified
            num_wrong, failure = len(indices), f"{type(error).__name__}: {error}"
        else:
            announced = job.digests[indices.start : indices.stop]
            num_wrong = sum(a != b for a, b in zip(announced, found, strict=True))
        with job.lock:
            job.num_wrong += num_wrong
            job.failure = job.failure or failure
            job.num_open -= len(indices)
            if job.num_open:
                return False
        self._verdicts.append(Verdict(job.tag, len(job.block_ids), job.num_wrong, job.failure))
        return True
