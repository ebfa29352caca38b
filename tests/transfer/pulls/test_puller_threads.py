"""The transfer threads of a puller over both backends: how many there are, how they share, when they sleep."""

import threading
import time

import pytest
import torch
from pulling import BLOCK_BYTES, names_of_threads

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.pulls.puller import Puller


@pytest.fixture
def threads_of_reads(monkeypatch):
    """The names of the threads that posted READs over NIXL."""
    names, pull = [], NixlTransport.pull

    def record(*arguments):
        names.append(threading.current_thread().name)
        return pull(*arguments)

    monkeypatch.setattr(NixlTransport, "pull", record)
    return names


def test_two_threads_share_a_request_where_they_copy_themselves(make_pulling, local, peer, backend, threads_of_reads):
    pulling = make_pulling(max_read_bytes=2 * BLOCK_BYTES)
    if backend == "tcp":  # its connections have threads of their own
        assert names_of_threads() == {"kv-transfer-0"}
        return
    until_s = time.monotonic() + 10
    while set(threads_of_reads) != {"kv-transfer-0", "kv-transfer-1"}:
        assert time.monotonic() < until_s, threads_of_reads
        threads_of_reads.clear()
        local.blocks.fill_(0xAA)
        outcome = pulling.pull(peer, list(range(47, -1, -1)), list(range(48)))
        assert (outcome.ok, outcome.num_bytes) == (True, 48 * BLOCK_BYTES)
        assert torch.equal(local.blocks[:48], peer.blocks.flip(0))
        assert len(threads_of_reads) == 24


def test_small_requests_take_turns_over_the_threads(pulling, peer, backend, threads_of_reads):
    for _ in range(4):
        assert pulling.pull(peer, [1, 2], [1, 2]).ok
    expected = ["kv-transfer-0", "kv-transfer-1"] * 2
    assert sorted(threads_of_reads) == (sorted(expected) if backend == "nixl" else [])


def test_one_thread_is_enough_where_a_second_reader_does_not_start(make_pulling, local, peer, monkeypatch, caplog):
    def refuse():
        raise TransferError(TransferReason.LOOKUP, "no more file descriptors")

    monkeypatch.setattr(local.transport, "another_reader", refuse)
    pulling = make_pulling(max_read_bytes=2 * BLOCK_BYTES)
    assert "reads with one thread less" in caplog.text
    assert pulling.pull(peer, list(range(20)), list(range(20))).ok


def test_a_puller_that_never_started_closes_its_transports(local):
    puller = Puller({local.transport.name: local.transport}, local.blocks)
    puller.close()
    assert names_of_threads() == set()


def test_a_thread_without_work_sleeps(pulling, peer):
    assert pulling.pull(peer, [1], [1]).ok
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.05
