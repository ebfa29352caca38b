"""The transfer threads over both backends, with real peers."""

import queue
import random
import threading
import time

import msgspec
import pytest
import torch

from pdserve.errors import TransferError
from pdserve.faults import Faults
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.digest import block_digests
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.pulls.pull import PullRequest
from pdserve.transfer.pulls.puller import Puller
from pdserve.transfer.pulls.quarantine import QuarantineLimits

NONCE = "nonce-of-a-hand-off"
BLOCK_BYTES = 64 * 1024
NO_DIGESTS: list[bytes] = []


class Pulling:
    """A puller and its outcomes in the order they came."""

    def __init__(self, local, **options):
        self.local = local
        self.faults = Faults()
        self.ends, self.terminals = queue.Queue(), queue.Queue()
        self.descriptors = []
        transport = local.transport
        self.puller = Puller(
            {transport.name: transport},
            local.blocks,
            faults=self.faults,
            on_descriptor=self.descriptors.append,
            **options,
        )
        self.puller.start()

    def submit(self, peer, remote_ids, local_ids, *, digests=None, within_s=5.0):
        request = PullRequest(
            descriptor=peer.descriptor,
            nonce=NONCE,
            remote_ids=remote_ids,
            local_ids=local_ids,
            digests=block_digests(peer.blocks, remote_ids) if digests is None else digests,
            deadline_s=time.monotonic() + within_s,
            on_end=self.ends.put,
            on_terminal=self.terminals.put,
        )
        return self.puller.submit(request)

    def end(self, timeout_s=10.0):
        return self.ends.get(timeout=timeout_s)

    def pull(self, peer, remote_ids, local_ids, **options):
        ticket = self.submit(peer, remote_ids, local_ids, **options)
        outcome = self.end()
        assert outcome.ticket == ticket
        return outcome


@pytest.fixture
def pulling(local):
    pulling = Pulling(local)
    yield pulling
    pulling.puller.close()
    assert pulling.ends.empty(), "an outcome that no test asked for"


def test_verified_blocks_arrive_whole(pulling, peer):
    outcome = pulling.pull(peer, [5, 9, 40], [1, 2, 3])
    assert (outcome.ok, outcome.reason, outcome.is_terminal) == (True, None, True)
    assert outcome.num_bytes == 3 * BLOCK_BYTES
    assert outcome.duration_s > 0
    assert torch.equal(pulling.local.blocks[1:4], peer.blocks[[5, 9, 40]])


def test_long_requests_are_split_and_come_as_one(local, peer):
    pulling = Pulling(local, max_read_bytes=3 * BLOCK_BYTES)
    ids = list(range(47, -1, -1))
    outcome = pulling.pull(peer, ids, list(range(48)))
    assert outcome.ok
    assert outcome.num_bytes == 48 * BLOCK_BYTES
    assert torch.equal(pulling.local.blocks[:48], peer.blocks.flip(0))
    pulling.puller.close()


@pytest.fixture
def threads_of_reads(monkeypatch):
    """The names of the threads that posted READs over NIXL."""
    names, pull = [], NixlTransport.pull

    def record(*arguments):
        names.append(threading.current_thread().name)
        return pull(*arguments)

    monkeypatch.setattr(NixlTransport, "pull", record)
    return names


def names_of_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kv-transfer")}


def test_two_threads_share_a_request_where_they_copy_themselves(local, peer, backend, threads_of_reads):
    pulling = Pulling(local, max_read_bytes=2 * BLOCK_BYTES)
    if backend == "tcp":  # its connections have threads of their own
        assert names_of_threads() == {"kv-transfer-0"}
        pulling.puller.close()
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
    pulling.puller.close()


def test_small_requests_take_turns_over_the_threads(pulling, peer, backend, threads_of_reads):
    for _ in range(4):
        assert pulling.pull(peer, [1, 2], [1, 2]).ok
    expected = ["kv-transfer-0", "kv-transfer-1"] * 2
    assert sorted(threads_of_reads) == (sorted(expected) if backend == "nixl" else [])


def test_one_thread_is_enough_where_a_second_reader_does_not_start(local, peer, monkeypatch, caplog):
    def refuse():
        raise TransferError(TransferReason.LOOKUP, "no more file descriptors")

    monkeypatch.setattr(local.transport, "another_reader", refuse)
    pulling = Pulling(local, max_read_bytes=2 * BLOCK_BYTES)
    assert "reads with one thread less" in caplog.text
    assert pulling.pull(peer, list(range(20)), list(range(20))).ok
    pulling.puller.close()


@pytest.mark.parametrize("wrong", [0, 11, 23])
def test_a_wrong_block_in_any_part_fails_the_request_once(local, peer, wrong):
    pulling = Pulling(local, max_read_bytes=2 * BLOCK_BYTES)
    ids = list(range(24))
    digests = block_digests(peer.blocks, ids)
    digests[wrong] = bytes(16)
    outcome = pulling.pull(peer, ids, ids, digests=digests)
    assert (outcome.ok, outcome.reason, outcome.is_terminal) == (False, "verify", True)
    assert "1 of 2 blocks differ" in outcome.detail
    assert pulling.puller.failed_peers() == {peer.peer}
    assert pulling.pull(peer, ids, ids).ok
    pulling.puller.close()
    assert pulling.ends.empty()


def test_every_request_of_a_storm_ends_once_and_is_right_where_it_says_so(local, peer):
    pulling = Pulling(local, max_read_bytes=BLOCK_BYTES)
    chooser, tickets = random.Random(0), {}
    for number in range(150):
        if number % 10 == 0:
            stage = chooser.choice(["post", "copy", "verify", "notify"])
            pulling.faults.put({"fail": {"stage": stage, "times": 2}, "corrupt_block": {"times": 1}})
        remote_ids = chooser.sample(range(48), 6)
        local_ids = list(range(6 * (number % 10), 6 * (number % 10) + 6))
        tickets[pulling.submit(peer, remote_ids, local_ids)] = (remote_ids, local_ids)
        if chooser.random() < 0.3:
            pulling.puller.abort(chooser.choice(list(tickets)))
        if number % 10 == 9:  # before its blocks are used again
            for outcome in [pulling.end() for _ in range(10)]:
                remote_ids, local_ids = tickets.pop(outcome.ticket)
                assert outcome.is_terminal
                assert outcome.reason in {None, "aborted", "post", "copy", "verify", "notify"}
                assert not outcome.ok or torch.equal(local.blocks[local_ids], peer.blocks[remote_ids])
            assert tickets == {}
    pulling.puller.close()
    assert pulling.ends.empty()


def test_many_requests_at_once_each_end_once(pulling, peer):
    tickets = [pulling.submit(peer, [i % 48, (i + 7) % 48], [(2 * i) % 64, (2 * i + 1) % 64]) for i in range(32)]
    outcomes = [pulling.end() for _ in tickets]
    assert sorted(outcome.ticket for outcome in outcomes) == tickets
    assert all(outcome.ok for outcome in outcomes)
    for i in range(32):
        assert torch.equal(pulling.local.blocks[2 * i], peer.blocks[i % 48])
        assert torch.equal(pulling.local.blocks[2 * i + 1], peer.blocks[(i + 7) % 48])


def test_a_corrupted_block_is_found_and_the_next_request_works(pulling, peer):
    pulling.faults.put({"corrupt_block": {"times": 1}})
    outcome = pulling.pull(peer, [1, 2], [1, 2])
    assert (outcome.ok, outcome.reason, outcome.is_terminal) == (False, "verify", True)
    assert "1 of 2 blocks" in outcome.detail
    assert pulling.pull(peer, [1, 2], [1, 2]).ok


def test_blocks_that_the_peer_has_reused_are_found(pulling, spawn_peer):
    peer = spawn_peer().expect_all()
    digests = block_digests(peer.blocks, [3, 4])
    peer.command("fill", 4, 17)
    outcome = pulling.pull(peer, [3, 4], [3, 4], digests=digests)
    assert outcome.reason == TransferReason.VERIFY
    assert peer.descriptor.peer in pulling.puller.failed_peers()


def test_without_digests_nothing_is_verified(pulling, peer):
    pulling.faults.put({"corrupt_block": {"times": 1}})
    assert pulling.pull(peer, [1], [1], digests=NO_DIGESTS).ok


@pytest.mark.parametrize("stage", ["connect", "post", "copy", "verify", "notify"])
def test_one_failure_of_a_stage_ends_one_request_and_no_later_one(pulling, peer, stage):
    pulling.faults.put({"fail": {"stage": stage, "times": 1}})
    outcome = pulling.pull(peer, [1], [1])
    assert (outcome.ok, outcome.reason, outcome.is_terminal) == (False, stage, True)
    assert pulling.puller.failed_peers() == {peer.peer}
    assert pulling.puller.num_failures_in_a_row == 1
    for _ in range(20):
        assert pulling.pull(peer, [1], [1]).ok
    assert pulling.puller.failed_peers() == frozenset()
    assert pulling.puller.num_failures_in_a_row == 0


def test_a_prepared_peer_is_connected_before_its_first_request(pulling, spawn_peer):
    peer = spawn_peer().expect_all()
    pulling.puller.prepare(peer.descriptor)
    until_s = time.monotonic() + 5
    while not is_connected(pulling, peer):
        assert time.monotonic() < until_s
        time.sleep(0.005)
    assert pulling.pull(peer, [1], [1]).ok


def is_connected(pulling, peer):
    try:
        return pulling.local.transport.is_connected(peer.peer)
    except TransferError:
        return False


def test_preparing_a_frozen_or_dead_peer_costs_nothing(pulling, peer, spawn_peer):
    frozen, dead = spawn_peer(seed=2), spawn_peer(seed=3)
    assert frozen.descriptor
    assert dead.descriptor
    frozen.freeze()
    dead.kill()
    pulling.puller.prepare(frozen.descriptor)
    pulling.puller.prepare(dead.descriptor)
    started_s = time.monotonic()
    assert pulling.pull(peer, [1], [1]).ok
    assert time.monotonic() - started_s < 0.4
    assert pulling.puller.failed_peers() == frozenset()


def test_delay_hook_delays_the_first_read(pulling, peer):
    pulling.faults.put({"pull_delay_s": 0.2})
    started_s = time.monotonic()
    assert pulling.pull(peer, [1], [1]).ok
    assert time.monotonic() - started_s >= 0.2


def test_an_aborted_request_ends_once_and_its_ticket_is_dead(pulling, peer):
    pulling.faults.put({"pull_delay_s": 30})
    ticket = pulling.submit(peer, [1], [1], within_s=60)
    pulling.puller.abort(ticket)
    outcome = pulling.end()
    assert (outcome.ticket, outcome.reason, outcome.is_terminal) == (ticket, "aborted", True)
    pulling.puller.abort(ticket)
    pulling.puller.abort(12345)
    pulling.faults.put({})
    assert pulling.pull(peer, [1], [2]).ok
    assert bool((pulling.local.blocks[1] == 0xAA).all())
    assert pulling.puller.failed_peers() == frozenset(), "an abort says nothing about the peer"


def test_frozen_peer_costs_its_own_requests_and_nobody_elses(pulling, peer, spawn_peer):
    frozen = spawn_peer().expect_all()
    frozen.freeze()
    started_s = time.monotonic()
    stuck = pulling.submit(frozen, list(range(20)), list(range(20)), within_s=0.4)
    slowest_s = 0.0
    for i in range(10):
        before_s = time.monotonic()
        assert pulling.pull(peer, [i], [40 + i]).ok
        slowest_s = max(slowest_s, time.monotonic() - before_s)
    assert slowest_s < 0.25
    outcome = pulling.end()
    assert outcome.ticket == stuck
    assert outcome.reason in {"timeout", "connect"}
    assert time.monotonic() - started_s < 1.5
    assert frozen.peer in pulling.puller.failed_peers()
    frozen.thaw()
    assert pulling.pull(frozen, [1], [1]).ok
    assert frozen.peer not in pulling.puller.failed_peers()


def test_peer_that_freezes_later_times_out_and_its_blocks_become_terminal_when_it_thaws(pulling, peer, spawn_peer):
    frozen = spawn_peer().expect_all()
    assert pulling.pull(frozen, [0], [0]).ok
    frozen.freeze()
    stuck = pulling.submit(frozen, list(range(48)), list(range(48)), within_s=0.3)
    healthy = pulling.submit(peer, [7], [60])
    outcomes = {outcome.ticket: outcome for outcome in (pulling.end(), pulling.end())}
    assert outcomes[healthy].ok
    outcome = outcomes[stuck]
    assert outcome.ok or outcome.reason == TransferReason.TIMEOUT
    frozen.thaw()
    if not outcome.is_terminal:
        assert pulling.terminals.get(timeout=5).ticket == outcome.ticket
    assert pulling.pull(frozen, [3], [3]).ok


def test_killed_peer_fails_in_bounded_time_and_its_successor_works(pulling, peer, spawn_peer):
    victim = spawn_peer().expect_all()
    assert pulling.pull(victim, [0], [0]).ok
    victim.kill()
    started_s = time.monotonic()
    outcome = pulling.pull(victim, list(range(30)), list(range(30)))
    assert not outcome.ok
    assert time.monotonic() - started_s < 3
    assert pulling.pull(peer, [1], [1]).ok
    successor = spawn_peer(generation="g2").expect_all()
    assert pulling.pull(successor, list(range(30)), list(range(30))).ok
    assert torch.equal(pulling.local.blocks[:30], successor.blocks[:30])


def test_disconnecting_a_peer_ends_its_requests(pulling, peer, spawn_peer):
    gone = spawn_peer().expect_all()
    gone.freeze()
    ticket = pulling.submit(gone, [1], [1], within_s=60)
    pulling.puller.disconnect(gone.peer)
    pulling.puller.disconnect(WorkerRef("never", "known"))
    outcome = pulling.end()
    assert (outcome.ticket, outcome.reason) == (ticket, "disconnected")
    assert pulling.pull(peer, [1], [1]).ok


def test_incompatible_peer_is_refused_alone(pulling, peer, spawn_peer):
    other = spawn_peer(kv_signature="model=other").expect_all()
    outcome = pulling.pull(other, [1], [1])
    assert outcome.reason == TransferReason.GEOMETRY
    assert "model: tiny here, other there" in outcome.detail
    assert pulling.pull(peer, [1], [1]).ok


def test_backend_that_is_not_here_is_refused(pulling, peer, backend):
    foreign = msgspec.structs.replace(peer.descriptor, backend="carrier-pigeon")
    request = PullRequest(foreign, NONCE, [1], [1], [], time.monotonic() + 5, pulling.ends.put)
    pulling.puller.submit(request)
    assert pulling.end().reason == TransferReason.LOOKUP


def test_a_callback_that_raises_harms_nobody(pulling, peer, caplog):
    def raise_anything(outcome):
        raise ValueError("a defect elsewhere")

    deadline_s = time.monotonic() + 5
    pulling.puller.submit(PullRequest(peer.descriptor, NONCE, [1], [1], [], deadline_s, raise_anything))
    assert pulling.pull(peer, [2], [2]).ok
    while "a defect elsewhere" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert pulling.pull(peer, [3], [3]).ok


def test_closing_ends_every_request_and_refuses_new_ones(local, peer):
    pulling = Pulling(local, limits=QuarantineLimits(drain_s=0.3))
    pulling.faults.put({"pull_delay_s": 30})
    tickets = {pulling.submit(peer, [1], [1], within_s=60) for _ in range(3)}
    pulling.puller.close()
    outcomes = [pulling.ends.get_nowait() for _ in tickets]
    assert {outcome.ticket for outcome in outcomes} == tickets
    assert {outcome.reason for outcome in outcomes} == {"aborted"}
    with pytest.raises(TransferError, match="closed"):
        pulling.submit(peer, [1], [1])
    pulling.puller.close()


def test_closing_is_a_fence_for_reads_from_a_frozen_peer(local, spawn_peer):
    pulling = Pulling(local, limits=QuarantineLimits(drain_s=0.2))
    frozen = spawn_peer().expect_all()
    assert pulling.pull(frozen, [0], [0]).ok
    frozen.freeze()
    pulling.submit(frozen, list(range(48)), list(range(48)), within_s=60)
    time.sleep(0.05)
    pulling.puller.close()
    outcome = pulling.ends.get_nowait()
    if not outcome.is_terminal:
        assert pulling.terminals.get_nowait() == outcome
    local.blocks.fill_(0x55)
    frozen.thaw()
    time.sleep(0.3)
    assert bool((local.blocks == 0x55).all())
    assert frozen.is_alive


def test_a_puller_that_never_started_closes_its_transports(local):
    puller = Puller({local.transport.name: local.transport}, local.blocks)
    puller.close()
    assert names_of_threads() == set()


def test_a_thread_without_work_sleeps(pulling, peer):
    assert pulling.pull(peer, [1], [1]).ok
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.05
