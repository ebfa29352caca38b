"""Pulling from real peers that are frozen, dead, gone or of another model: only their own requests pay."""

import time

import msgspec
import pytest
import torch
from pulling import NONCE

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.pulls.pull import PullRequest


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


@pytest.mark.alone
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


@pytest.mark.alone
def test_frozen_peer_costs_its_own_requests_and_no_others(pulling, peer, spawn_peer):
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
    assert pulling.puller.failed_peers() == {frozen.peer}
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
