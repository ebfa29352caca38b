"""Two transfer threads of one worker where a READ, an agent or a connection of one of them fails."""

import queue
import threading
import time

import pytest
import torch
from stubborn import BLOCK_BYTES, DEAF, GOOD, StubbornTransport, descriptor

from pdserve.transfer.pulls.pull import PullRequest
from pdserve.transfer.pulls.puller import Puller
from pdserve.transfer.pulls.quarantine import QuarantineLimits


@pytest.mark.parametrize("is_overdue_by", ["age", "number"])
def test_both_threads_quarantine_their_reads_and_only_the_first_agent_is_announced(is_overdue_by):
    transport, descriptors = StubbornTransport(), []
    ends, terminals = queue.Queue(), queue.Queue()
    puller = Puller(
        {"stubborn": transport},
        torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8),
        limits=QuarantineLimits(max_age_s=0.2) if is_overdue_by == "age" else QuarantineLimits(60, max_ratio=0.02),
        max_read_bytes=BLOCK_BYTES,
        on_descriptor=descriptors.append,
    )
    puller.start()
    ids, until_s = list(range(20)), time.monotonic() + 60
    ticket = puller.submit(PullRequest(descriptor(DEAF), "n", ids, ids, [], until_s, ends.put, terminals.put))
    while len(transport.reads) + len(transport.other.reads) < 4:  # two of each thread
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert sorted(ids for _, ids in transport.log + transport.other.log) == [[0], [1], [2], [3]]
    puller.abort(ticket)
    outcome = ends.get(timeout=5)
    assert (outcome.reason, outcome.is_terminal) == ("aborted", False)
    assert terminals.get(timeout=5) == outcome
    assert (transport.num_recreated, transport.other.num_recreated) == (1, 1)
    assert [announced.worker_id for announced in descriptors] == ["new-1"]
    puller.close()
    assert (ends.qsize(), terminals.qsize()) == (0, 0)


def test_an_agent_that_does_not_come_back_leaves_its_part_to_the_other_thread():
    transport, ends, terminals = StubbornTransport(), queue.Queue(), queue.Queue()
    blocks, limits = torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8), QuarantineLimits(max_age_s=0.05)
    puller = Puller({"stubborn": transport}, blocks, limits=limits, max_read_bytes=BLOCK_BYTES)
    transport.other.is_broken = True
    puller.start()
    ids, until_s = [0, 1, 2, 3], time.monotonic() + 60
    ticket = puller.submit(PullRequest(descriptor(DEAF), "n", ids, ids, [], until_s, ends.put, terminals.put))
    while not transport.other.reads:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    puller.abort(ticket)
    ends.get(timeout=5)
    terminals.get(timeout=5)
    assert transport.other.num_recreated == 1
    transport.other.log.clear()
    for _ in range(5):
        puller.submit(PullRequest(descriptor(GOOD), "n", ids, ids, [], until_s, ends.put))
        assert ends.get(timeout=5).ok
    assert transport.other.log == []
    puller.close()


@pytest.mark.parametrize("attempt", range(5))  # it is a matter of which thread is faster
def test_closing_lets_the_reads_of_every_thread_end_though_another_one_has_none(attempt):
    transport, ends = StubbornTransport(), queue.Queue()
    blocks = torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8)
    puller = Puller({"stubborn": transport}, blocks, max_read_bytes=BLOCK_BYTES)
    transport.start_connect = lambda peer_descriptor: None  # the first thread never gets to READ
    transport.other.is_good_slow = True
    puller.start()
    ids, until_s = [0, 1, 2, 3], time.monotonic() + 60
    puller.submit(PullRequest(descriptor(GOOD), "n", ids, ids, [], until_s, ends.put))
    while len(transport.other.reads) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    threading.Timer(0.05, lambda: setattr(transport.other, "is_good_slow", False)).start()
    puller.close()
    assert transport.other.aborted == []
    outcome = ends.get_nowait()
    assert (outcome.reason, outcome.num_bytes) == ("aborted", 2 * BLOCK_BYTES)
    assert ends.empty()
