"""Compares received blocks with their digests in a thread of its own, so that the next READ is copied meanwhile.

Reads blocks and never writes one. A result that nobody waits for any more is simply dropped by its taker.
`ThreadVerifier` works on any device; on a CPU with its kernels `NativeVerifier` does it without Python's lock.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from pdserve.kernels import cpu_ops
from pdserve.kernels.cpu_block_verifier import CpuBlockVerifier
from pdserve.transfer.digest import block_digests, weight_addresses
from pdserve.transfer.memory import bytes_view

_SHORT_BYTES = 1 << 20
"""Compared by the owner alone: waking up another thread would take as long."""
_HELP_US = 200
"""The owner compares and waits this long at most before it looks after everything else again."""

T = TypeVar("T")


class Verdict(NamedTuple, Generic[T]):
    """What was found out about some blocks."""

    tag: T
    """The caller's own."""
    num_blocks: int
    num_wrong: int
    """Blocks whose content is not what was announced."""
    failure: str = ""
    """Why the blocks could not be compared at all."""


class Verifier(Protocol[T]):
    """One thread, its owner, makes all calls but `expect`."""

    def expect(self) -> None:
        """Blocks are on their way: it may be worth while waking up now. From any thread."""
        ...

    def begin(self, tag: T, block_ids: list[int], digests: list[bytes], *, is_last: bool = False) -> None:
        """Compare these blocks with their digests; `take` tells the result.

        Args:
            is_last: nothing is copied meanwhile, so that the owner has time to compare them itself.
        """
        ...

    def take(self) -> list[Verdict[T]]:
        """Verdicts since the last call."""
        ...

    def help(self) -> bool:
        """Do a part of the work, or wait a moment for a verdict; whether to look again at once."""
        ...

    def close(self) -> None:
        """Wait until no block is being read any more. Again: nothing."""
        ...


def create_verifier(kv_cache: torch.Tensor, on_verdict: Callable[[], None]) -> Verifier[T]:
    """The fastest one for this tensor, `[num_blocks, …]`.

    Args:
        on_verdict: may be called in another thread whenever `take` has something new.
    """
    if kv_cache.device.type == "cpu" and cpu_ops.why_unavailable() is None and sys.byteorder == "little":
        return NativeVerifier(kv_cache)
    return ThreadVerifier(kv_cache, on_verdict)


class NativeVerifier(Generic[T]):
    """See `Verifier`: a thread of the CPU kernels (kernels/cpu/verify.cpp), which stays awake while blocks arrive."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._blocks = bytes_view(kv_cache)
        num_blocks, self._block_bytes = self._blocks.shape
        weights = weight_addresses(self._block_bytes)
        self._native = CpuBlockVerifier(self._blocks.data_ptr(), num_blocks, self._block_bytes, weights=weights)
        self._tags: dict[int, tuple[T, int]] = {}
        self._numbers = itertools.count()

    def expect(self) -> None:
        """See `Verifier.expect`."""
        self._native.expect()

    def begin(self, tag: T, block_ids: list[int], digests: list[bytes], *, is_last: bool = False) -> None:
        """See `Verifier.begin`."""
        job = next(self._numbers)
        self._tags[job] = (tag, len(block_ids))
        is_short = is_last and len(block_ids) * self._block_bytes <= _SHORT_BYTES
        self._native.begin(job, block_ids, b"".join(digests), is_for_thread=not is_short)
        if is_last:
            self._native.help(_HELP_US)

    def take(self) -> list[Verdict[T]]:
        """See `Verifier.take`."""
        return [Verdict(*self._tags.pop(job), num_wrong) for job, num_wrong in self._native.take()]

    def help(self) -> bool:
        """See `Verifier.help`."""
        return self._native.help(_HELP_US)

    def close(self) -> None:
        """See `Verifier.close`."""
        self._native.close()


class ThreadVerifier(Generic[T]):
    """See `Verifier`: a Python thread that computes digests wherever the blocks are."""

    def __init__(self, kv_cache: torch.Tensor, on_verdict: Callable[[], None]) -> None:
        self._kv_cache = kv_cache
        self._on_verdict = on_verdict
        self._waiting: queue.SimpleQueue[tuple[T, list[int], list[bytes]] | None] = queue.SimpleQueue()
        self._verdicts: deque[Verdict[T]] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-verify", daemon=True)

    def expect(self) -> None:
        """See `Verifier.expect`."""

    def begin(self, tag: T, block_ids: list[int], digests: list[bytes], *, is_last: bool = False) -> None:
        """See `Verifier.begin`."""
        if self._thread.ident is None:
            self._thread.start()
        self._waiting.put((tag, block_ids, digests))

    def take(self) -> list[Verdict[T]]:
        """See `Verifier.take`."""
        return [self._verdicts.popleft() for _ in range(len(self._verdicts))]

    def help(self) -> bool:
        """See `Verifier.help`: the owner is woken up by `on_verdict`."""
        return False

    def close(self) -> None:
        """See `Verifier.close`."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            self._verdicts.append(self._compare(*job))
            self._on_verdict()

    def _compare(self, tag: T, block_ids: list[int], digests: list[bytes]) -> Verdict[T]:
        try:
            found = block_digests(self._kv_cache, block_ids)
        except Exception as error:  # whatever a device says: these blocks are not verified
            return Verdict(tag, len(block_ids), len(block_ids), f"{type(error).__name__}: {error}")
        return Verdict(tag, len(block_ids), sum(a != b for a, b in zip(digests, found, strict=True)))
