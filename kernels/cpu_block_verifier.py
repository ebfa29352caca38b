"""The thread that compares KV blocks with their digests as Python sees it (kernels/cpu/verify.cpp).

Plain ctypes, as in `cpu_ops`: every call releases the GIL, and the thread itself never needs it.
"""

from __future__ import annotations

import ctypes
import threading
from array import array

from pdserve.kernels.cpu_ops import load_library

_MAX_VERDICTS = 64


class _Verdict(ctypes.Structure):
    """PdsVerdict."""

    _fields_ = (("job", ctypes.c_int64), ("num_wrong", ctypes.c_int64))


class CpuBlockVerifier:
    """Of one owner, whose thread makes all calls but `expect`.

    Args:
        pool: address of the blocks, which outlive this.
        weights: addresses of both rows of the digest's weights, which outlive this.

    Raises:
        MemoryError: there is none left.
    """

    def __init__(self, pool: int, num_blocks: int, block_bytes: int, *, weights: tuple[int, int]) -> None:
        self._library = load_library()
        self._handle: int | None = self._library.pds_verifier_create(pool, num_blocks, block_bytes, *weights)
        if not self._handle:
            raise MemoryError("no memory for a verifier of KV blocks")
        self._verdicts = (_Verdict * _MAX_VERDICTS)()
        self._closing = threading.Lock()

    def expect(self) -> None:
        """Blocks will arrive in a moment: the thread wakes up meanwhile and stays awake for a short while.

        From any thread; after `close` nothing happens.
        """
        with self._closing:
            if self._handle:
                self._library.pds_verifier_expect(self._handle)

    def begin(self, job: int, block_ids: list[int], digests: bytes, *, is_for_thread: bool) -> None:
        """Compare blocks with their digests; `take` tells how many were wrong.

        Args:
            job: the caller's own number.
            digests: 16 bytes per block.
            is_for_thread: False: the caller helps at once, so that nobody need be woken up.

        Raises:
            MemoryError: nothing was begun.
            IndexError: neither; the pool has no such block.
        """
        ids = array("q", block_ids)
        assert len(digests) == 16 * len(ids), (len(digests), len(ids))
        address = ids.buffer_info()[0]
        if error := self._library.pds_verifier_begin(self._handle, job, address, digests, len(ids), is_for_thread):
            raise (MemoryError, IndexError)[error - 1](f"cannot verify KV blocks {block_ids}")

    def help(self, longest_us: int) -> bool:
        """Compare blocks, and wait where none are left, until all jobs are over or time is up; whether one is."""
        return bool(self._library.pds_verifier_help(self._handle, longest_us))

    def take(self) -> list[tuple[int, int]]:
        """Jobs that are over since the last call, with their number of wrong blocks; some may stay for the next."""
        count = self._library.pds_verifier_take(self._handle, self._verdicts, _MAX_VERDICTS)
        return [(verdict.job, verdict.num_wrong) for verdict in self._verdicts[:count]]

    def close(self) -> None:
        """No block is read afterwards; what was begun and not compared is dropped. Again: nothing."""
        with self._closing:
            handle, self._handle = self._handle, None
        if handle:
            self._library.pds_verifier_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
