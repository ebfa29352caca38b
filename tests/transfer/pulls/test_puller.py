"""What pullers deliver over both backends from real peers: whole, verified blocks, once."""

import random
import time

import pytest
import torch
from pulling import BLOCK_BYTES, NONCE

from pdserve.reasons import TransferReason
from pdserve.transfer.digest import block_digests
from pdserve.transfer.pulls.pull import PullRequest

NO_DIGESTS: list[bytes] = []


def test_verified_blocks_arrive_whole(pulling, peer):
    outcome = pulling.pull(peer, [5, 9, 40], [1, 2, 3])
    assert (outcome.ok, outcome.reason, outcome.is_terminal) == (True, None, True)
    assert outcome.num_bytes == 3 * BLOCK_BYTES
    assert outcome.duration_s > 0
    assert torch.equal(pulling.local.blocks[1:4], peer.blocks[[5, 9, 40]])


def test_long_requests_are_split_and_come_as_one(make_pulling, local, peer):
    pulling = make_pulling(max_read_bytes=3 * BLOCK_BYTES)
    ids = list(range(47, -1, -1))
    outcome = pulling.pull(peer, ids, list(range(48)))
    assert outcome.ok
    assert outcome.num_bytes == 48 * BLOCK_BYTES
    assert torch.equal(pulling.local.blocks[:48], peer.blocks.flip(0))


def test_many_requests_at_once_each_end_once(pulling, peer):
    tickets = [pulling.submit(peer, [i % 48, (i + 7) % 48], [(2 * i) % 64, (2 * i + 1) % 64]) for i in range(32)]
    outcomes = [pulling.end() for _ in tickets]
    assert sorted(outcome.ticket for outcome in outcomes) == tickets
    assert all(outcome.ok for outcome in outcomes)
    for i in range(32):
        assert torch.equal(pulling.local.blocks[2 * i], peer.blocks[i % 48])
        assert torch.equal(pulling.local.blocks[2 * i + 1], peer.blocks[(i + 7) % 48])


def test_every_request_of_a_storm_ends_once_and_is_right_where_it_says_so(make_pulling, local, peer):
    pulling = make_pulling(max_read_bytes=BLOCK_BYTES)
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
                pulling.until_terminal(outcome)
                assert outcome.reason in {None, "aborted", "post", "copy", "verify", "notify"}
                assert not outcome.ok or torch.equal(local.blocks[local_ids], peer.blocks[remote_ids])
            assert tickets == {}


@pytest.mark.parametrize("wrong", [0, 11, 23])
def test_a_wrong_block_in_any_part_fails_the_request_once(make_pulling, peer, wrong):
    pulling = make_pulling(max_read_bytes=2 * BLOCK_BYTES)
    ids = list(range(24))
    digests = block_digests(peer.blocks, ids)
    digests[wrong] = bytes(16)
    outcome = pulling.pull(peer, ids, ids, digests=digests)
    assert (outcome.ok, outcome.reason) == (False, "verify")
    pulling.until_terminal(outcome)
    assert "1 of 2 blocks differ" in outcome.detail
    assert pulling.puller.failed_peers() == {peer.peer}
    assert pulling.pull(peer, ids, ids).ok


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


def test_a_callback_that_raises_harms_nothing_else(pulling, peer, caplog):
    def raise_anything(outcome):
        raise ValueError("a defect elsewhere")

    deadline_s = time.monotonic() + 5
    pulling.puller.submit(PullRequest(peer.descriptor, NONCE, [1], [1], [], deadline_s, raise_anything))
    assert pulling.pull(peer, [2], [2]).ok
    while "a defect elsewhere" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert pulling.pull(peer, [3], [3]).ok
