"""Pages of the KV cache come before its blocks are used: no more than asked for, nothing is changed, nothing hangs."""

from __future__ import annotations

import mmap
import resource
import sys
import threading
import time

import pytest
import torch

from pdserve.engine.executors.cpu.weights import map_memory
from pdserve.worker.pages_ahead import PagesAhead, populate_pages

MIB = 1 << 20


class OnGpu:
    """All that is asked of such a tensor."""

    is_cuda = True


class Backed:
    """Stands for the system: notes what it was asked for."""

    def __init__(self, *, can: bool = True) -> None:
        self.slices: list[tuple[int, int]] = []
        self.grown = threading.Condition()
        self._can = can

    def __call__(self, address: int, num_bytes: int) -> bool:
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0
        with self.grown:
            self.slices.append((address, num_bytes))
            self.grown.notify()
        return self._can

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.slices)

    def wait_for(self, num_bytes: int) -> None:
        with self.grown:
            assert self.grown.wait_for(lambda: self.num_bytes >= num_bytes, 10), self.num_bytes


def test_memory_is_backed_as_far_ahead_as_asked_and_no_further():
    memory = map_memory(64 * MIB)
    backed = Backed()
    pages = PagesAhead(memory, 8 * MIB, backed)
    pages.start(0)
    backed.wait_for(8 * MIB)
    pages.reach(20 * MIB)
    backed.wait_for(28 * MIB)
    pages.reach(2 * MIB)  # a late word: nothing is taken back, and nothing done twice
    pages.stop(10)
    assert backed.num_bytes == 28 * MIB
    assert [address for address, _ in backed.slices] == [memory.data_ptr() + 2 * MIB * i for i in range(14)]


def test_of_a_gpu_nothing_is_backed_and_nothing_is_kept():
    backed = Backed()
    pages = PagesAhead(OnGpu(), 8 * MIB, backed)
    pages.start(0)
    pages.reach(MIB)
    pages.stop(10)
    assert backed.slices == list(pages._news.take()) == []


def test_once_blocks_are_used_it_rests_between_slices_so_that_steps_go_first():
    memory = map_memory(64 * MIB)
    backed, times = Backed(), []

    def populate(address: int, num_bytes: int) -> bool:
        times.append(time.perf_counter())
        time.sleep(0.002)
        return backed(address, num_bytes)

    pages = PagesAhead(memory, 8 * MIB, populate)
    pages.start(0)
    backed.wait_for(8 * MIB)
    pages.reach(8 * MIB)
    backed.wait_for(16 * MIB)
    pages.stop(10)
    assert times[7] - times[4] > 3 * 10 * 0.002, "ten times as long as each slice took"


@pytest.mark.parametrize("offset", [0, 64])
def test_it_ends_with_the_memory_in_whole_pages_of_it(offset):
    memory = map_memory(6 * MIB)[offset:]
    backed = Backed()
    pages = PagesAhead(memory, 100 * MIB, backed)
    pages.start(0)
    pages._thread.join(10)
    assert not pages._thread.is_alive()
    first, (last, num_bytes) = backed.slices[0][0], backed.slices[-1]
    assert memory.data_ptr() <= first < memory.data_ptr() + mmap.PAGESIZE
    assert last + num_bytes == memory.data_ptr() + memory.nbytes
    pages.reach(MIB)  # those who use blocks do not know, and need not
    assert list(pages._news.take()) == [], "it would never be taken"
    pages.stop(10)


def test_where_the_system_cannot_it_is_asked_once():
    memory = map_memory(64 * MIB)
    backed = Backed(can=False)
    pages = PagesAhead(memory, 8 * MIB, backed)
    pages.start(0)
    pages._thread.join(10)
    assert len(backed.slices) == 1


def test_it_stops_in_the_midst_of_its_work():
    memory = map_memory(64 * MIB)
    in_first, may_go_on, slices = threading.Event(), threading.Event(), []

    def populate(address: int, num_bytes: int) -> bool:
        slices.append(address)
        in_first.set()
        return may_go_on.wait(10)

    pages = PagesAhead(memory, 64 * MIB, populate)
    pages.start(0)
    assert in_first.wait(10)
    pages.stop(0)
    may_go_on.set()
    pages._thread.join(10)
    assert len(slices) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_writing_to_backed_memory_faults_no_more_and_its_contents_stay():
    memory = map_memory(32 * MIB)
    memory[: 4 * MIB].fill_(7)
    if not populate_pages(memory.data_ptr(), 16 * MIB):
        pytest.skip("this kernel is older than 5.14")
    assert bool((memory[: 4 * MIB] == 7).all())
    assert not bool(memory[4 * MIB : 16 * MIB].any())
    num_backed = _num_faults(lambda: memory[4 * MIB : 16 * MIB].fill_(1))
    num_fresh = _num_faults(lambda: memory[16 * MIB : 28 * MIB].fill_(1))
    assert 2 * num_backed < num_fresh, "six at least, of huge pages; the interpreter has some of its own"


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_memory_that_cannot_be_had_is_no_error_of_the_worker():
    assert not populate_pages(0, mmap.PAGESIZE)  # nothing is ever mapped there


def _num_faults(action) -> int:
    threads, before = torch.get_num_threads(), resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    torch.set_num_threads(1)
    try:
        action()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    finally:
        torch.set_num_threads(threads)
