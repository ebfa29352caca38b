"""Gets the pages of a CPU's KV cache from the system before any block in them is used.

An anonymous mapping has no memory until it is written to. That first write costs a fault, and the zeroing of a
page or of a huge page: for the 92 MB of a 2,000-token prompt 5 ms with huge pages, 35 ms without, and 100 to 200 ms
in a virtual machine whose host must find the memory first. A READ would pay for it in the hand-off gap, a prompt
chunk in TTFT. So a thread of its own stays some way ahead of the highest block used so far. Not everything at once:
who tries pdserve on a laptop keeps the memory that no request needs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor

from pdserve.log import get_logger
from pdserve.mailbox import Mailbox

logger = get_logger(__name__)

AHEAD_BYTES = 256 << 20
"""Blocks of a burst: nearly three 2,000-token prompts of the demo model. More follows while these are computed."""
_SLICE_BYTES = 2 << 20
"""Got in one call: a huge page."""
_REST_RATIO = 10.0
"""Times as long as the last slice took: one slice after the other held up decode steps, whatever this thread's priority
(docs/benchmarks.md)."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14: as if every page were written to, and nothing changes."""


class PagesAhead:
    """Keeps `ahead_bytes` of a tensor's memory beyond what is in use backed by pages.

    Args:
        memory: contiguous, used from its beginning on.
        ahead_bytes: how far.
        populate: backs the pages of an address range; returns whether the system can. Called in the thread.
    """

    def __init__(
        self,
        memory: Tensor,
        ahead_bytes: int = AHEAD_BYTES,
        populate: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._memory = memory  # keeps the mapping alive for the thread
        self._ahead_bytes = ahead_bytes
        self._populate = populate or populate_pages
        self._news: Mailbox[int | None] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="pages", daemon=True)

    def start(self, used_bytes: int) -> None:
        """Get those ahead of what is in use already. A GPU's memory is there from the beginning: nothing is done."""
        if not self._memory.is_cuda:
            self._thread.start()
            self.reach(used_bytes)

    def reach(self, used_bytes: int) -> None:
        """So much of the memory is in use now; any thread, never waits. Nothing once all of it is backed."""
        if self._thread.is_alive():
            self._news.put(used_bytes)

    def stop(self, timeout_s: float) -> None:
        """End after the current slice."""
        if self._thread.is_alive():
            self._news.put(None)
            self._thread.join(timeout_s)

    # --- in the thread

    def _run(self) -> None:
        first = -(-self._memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self._memory.data_ptr() + self._memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        wanted = next_address = first
        rest_ratio = 0.0  # at first, before any request waits for a step
        while next_address < last:
            if next_address >= wanted:
                self._news.wait()
            for used_bytes in self._news.take():
                if used_bytes is None:
                    return
                wanted = max(wanted, min(last, self._memory.data_ptr() + used_bytes + self._ahead_bytes))
            if next_address < wanted:
                num_bytes = min(_SLICE_BYTES, last - next_address)
                began_s = time.perf_counter()
                if not self._populate(next_address, num_bytes):
                    return
                next_address += num_bytes
                time.sleep(rest_ratio * (time.perf_counter() - began_s))
                if next_address >= wanted:
                    rest_ratio = _REST_RATIO


def populate_pages(address: int, num_bytes: int) -> bool:
    """Back whole pages of this process with memory; their contents stay. False: the system cannot, or has none."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE) == 0:
        return True
    number = ctypes.get_errno()
    if number != errno.EINVAL:  # that one means an old kernel, where pages come with their first use
        logger.warning("no memory for KV blocks ahead of their use: %s", os.strerror(number))
    return False
