"""Requests that are delayed, aborted, or still under way when their puller closes."""

import time

import pytest

from pdserve.errors import TransferError
from pdserve.transfer.pulls.quarantine import QuarantineLimits


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


def test_closing_ends_every_request_and_refuses_new_ones(make_pulling, peer):
    pulling = make_pulling(limits=QuarantineLimits(drain_s=0.3))
    pulling.faults.put({"pull_delay_s": 30})
    tickets = {pulling.submit(peer, [1], [1], within_s=60) for _ in range(3)}
    pulling.puller.close()
    outcomes = [pulling.ends.get_nowait() for _ in tickets]
    assert {outcome.ticket for outcome in outcomes} == tickets
    assert {outcome.reason for outcome in outcomes} == {"aborted"}
    with pytest.raises(TransferError, match="closed"):
        pulling.submit(peer, [1], [1])


def test_closing_is_a_fence_for_reads_from_a_frozen_peer(make_pulling, local, spawn_peer):
    pulling = make_pulling(limits=QuarantineLimits(drain_s=0.2))
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
