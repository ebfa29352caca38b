import threading

import pytest
import torch

from pdserve.transfer.digest import block_digests
from pdserve.transfer.verifier import Verdict, Verifier


@pytest.fixture
def blocks():
    return torch.arange(40, dtype=torch.uint8).reshape(5, 8).repeat(1, 100)


class Verifying:
    def __init__(self, blocks):
        self.is_new = threading.Event()
        self.verifier = Verifier(blocks, self.is_new.set)

    def verdicts(self, count):
        found = []
        while len(found) < count:
            assert self.is_new.wait(10), found
            self.is_new.clear()
            found += self.verifier.take()
        return found


@pytest.fixture
def verifying(blocks):
    scene = Verifying(blocks)
    yield scene
    scene.verifier.close()


def test_verdicts_count_wrong_blocks(verifying, blocks):
    digests = block_digests(blocks, [0, 1, 2])
    blocks[1, 7] ^= 1
    verifying.verifier.begin("first", [0, 1, 2], digests)
    verifying.verifier.begin("second", [2, 0], [digests[2], digests[0]])
    assert verifying.verdicts(2) == [Verdict("first", 3, 1), Verdict("second", 2, 0)]
    assert verifying.verifier.take() == []


def test_blocks_that_cannot_be_compared_are_all_wrong_and_the_next_ones_are_compared(verifying, blocks):
    (digest,) = block_digests(blocks, [4])
    verifying.verifier.begin("outside", [5], [digest])
    verifying.verifier.begin("inside", [4], [digest])
    outside, inside = verifying.verdicts(2)
    assert (outside.num_wrong, bool(outside.failure)) == (1, True)
    assert inside == Verdict("inside", 1, 0)


def test_closing_finishes_what_was_begun_and_reads_nothing_afterwards(verifying, blocks):
    digests = block_digests(blocks, list(range(5)))
    for number in range(20):
        verifying.verifier.begin(number, list(range(5)), digests)
    verifying.verifier.close()
    verifying.verifier.close()
    assert [verdict.tag for verdict in verifying.verifier.take()] == list(range(20))


def test_whoever_waits_can_do_the_work(blocks, monkeypatch):
    verifier = Verifier(blocks, lambda: None)
    monkeypatch.setattr(verifier._thread, "start", lambda: None)  # a thread that gets no processor
    digests = block_digests(blocks, [1, 2])
    blocks[2, 0] ^= 1
    verifier.begin("a", [1], digests[:1])
    verifier.begin("b", [2], digests[1:])
    assert [verifier.help() for _ in range(3)] == [True, True, False]
    assert verifier.take() == [Verdict("a", 1, 0), Verdict("b", 1, 1)]


def test_closing_without_any_blocks_is_harmless(blocks):
    Verifier(blocks, lambda: None).close()


@pytest.fixture
def large_blocks():
    return torch.arange(9, dtype=torch.uint8).repeat_interleave(1 << 20).reshape(9, 1 << 20)


def test_two_threads_share_the_blocks_of_one_call_and_every_wrong_one_counts_once(large_blocks):
    digests = block_digests(large_blocks, list(range(9)))
    for block_id in (0, 3, 4, 8):  # in each of three parts, at their edges
        large_blocks[block_id, -1] ^= 1
    scene = Verifying(large_blocks)
    for number in range(20):
        scene.verifier.begin(number, list(range(9)), digests)
    while scene.verifier.help():
        pass
    scene.verifier.close()
    verdicts = scene.verifier.take()
    assert sorted(verdict.tag for verdict in verdicts) == list(range(20))
    assert {(verdict.num_blocks, verdict.num_wrong) for verdict in verdicts} == {(9, 4)}


def test_a_part_that_cannot_be_compared_fails_the_whole_call(large_blocks):
    scene = Verifying(large_blocks)
    digests = block_digests(large_blocks, list(range(9)))
    scene.verifier.begin("outside", [*range(8), 9], digests)
    (verdict,) = scene.verdicts(1)
    assert (verdict.num_blocks, verdict.num_wrong, bool(verdict.failure)) == (9, 1, True)
    scene.verifier.close()


def test_the_last_few_blocks_are_compared_at_once_and_many_by_the_thread(large_blocks):
    scene = Verifying(large_blocks)
    digests = block_digests(large_blocks, list(range(9)))
    large_blocks[2, 0] ^= 1
    scene.verifier.begin("few", [1, 2, 3, 4], digests[1:5], is_last=True)
    assert scene.verifier.take() == [Verdict("few", 4, 1)]
    assert not scene.is_new.is_set(), "the owner needs no one to tell it"
    scene.verifier.begin("many", list(range(9)), digests, is_last=True)
    assert scene.verdicts(1) == [Verdict("many", 9, 1)]
    scene.verifier.close()


def test_waiting_briefly_ends_with_or_without_a_verdict(blocks, verifying):
    assert not verifying.verifier.wait_briefly()
    verifying.verifier.begin("one", [1], block_digests(blocks, [1]), is_last=True)
    assert verifying.verifier.wait_briefly()
