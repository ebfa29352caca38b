"""An offer announces every finished block once, in order, and again what a reader missed."""

from __future__ import annotations

import pytest

from pdserve.engine.sequence import Sequence
from pdserve.messages import AttemptKey
from pdserve.prefill_worker.offer import Offer, Reader
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams

BLOCK_SIZE = 4
D = WorkerRef("d", "g1")


def make_offer(num_prompt_tokens: int, *, has_digests: bool = True) -> Offer:
    sequence = Sequence(
        key=AttemptKey("r", 0, 1, "nonce"),
        prompt_token_ids=list(range(num_prompt_tokens)),
        num_original_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(seed=1, max_tokens=8),
        is_prefill_only=True,
    )
    num_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
    sequence.block_table = [100 + index for index in range(num_blocks)]
    chain = [bytes([index]) * 16 for index in range(num_prompt_tokens // BLOCK_SIZE)]
    return Offer(sequence, BLOCK_SIZE, chain, has_digests)


def digest_ready_blocks(offer: Offer) -> None:
    offer.digests += [bytes([block_id]) * 16 for block_id in offer.blocks_without_digest()]


def test_nothing_is_announced_without_a_reader() -> None:
    offer = make_offer(8)
    offer.advance(8)
    digest_ready_blocks(offer)
    assert offer.next_announcement(WorkerRef("p", "g")) is None


def test_a_late_reader_is_told_of_all_finished_blocks_at_once_then_of_each_chunk() -> None:
    offer = make_offer(14)
    offer.advance(9)  # two full blocks; the third is half written
    digest_ready_blocks(offer)
    offer.reader = Reader(D)
    first = offer.next_announcement(WorkerRef("p", "g"))
    assert first is not None
    assert (first.first_block_index, first.block_ids, first.is_last) == (0, [100, 101], False)
    assert first.chain_hash == bytes([1]) * 16
    assert offer.next_announcement(WorkerRef("p", "g")) is None
    offer.advance(14)
    digest_ready_blocks(offer)
    offer.token0 = 7
    last = offer.next_announcement(WorkerRef("p", "g"))
    assert last is not None
    assert (last.first_block_index, last.block_ids, last.is_last, last.token0) == (2, [102, 103], True, 7)
    assert last.chain_hash == bytes([2]) * 16  # the partial block is in no chain
    assert offer.next_announcement(WorkerRef("p", "g")) is None


def test_blocks_wait_for_their_digests_and_token_0_waits_for_all_blocks() -> None:
    offer = make_offer(8)
    offer.reader = Reader(D)
    offer.advance(8)
    offer.token0 = 3
    assert offer.next_announcement(WorkerRef("p", "g")) is None
    offer.digests.append(b"x" * 16)
    half = offer.next_announcement(WorkerRef("p", "g"))
    assert half is not None
    assert (half.block_ids, half.is_last, half.token0) == ([100], False, None)


def test_without_integrity_no_digest_is_awaited() -> None:
    offer = make_offer(8, has_digests=False)
    offer.reader = Reader(D)
    offer.advance(8)
    message = offer.next_announcement(WorkerRef("p", "g"))
    assert message is not None
    assert (message.block_ids, message.digests) == ([100, 101], [])


@pytest.mark.parametrize("num_known", [0, 1, 3])
def test_a_renewal_that_shows_a_gap_brings_the_missing_blocks_again(num_known: int) -> None:
    offer = make_offer(16)
    offer.reader = Reader(D)
    offer.advance(16)
    digest_ready_blocks(offer)
    offer.token0 = 5
    assert offer.next_announcement(WorkerRef("p", "g")) is not None
    offer.rewind(num_known, has_token0=False)
    again = offer.next_announcement(WorkerRef("p", "g"))
    assert again is not None
    assert (again.first_block_index, again.is_last, again.token0) == (num_known, True, 5)
    assert again.block_ids == [100, 101, 102, 103][num_known:]


def test_a_renewal_that_misses_only_token_0_brings_it_without_blocks() -> None:
    offer = make_offer(4)
    offer.reader = Reader(D)
    offer.advance(4)
    digest_ready_blocks(offer)
    offer.token0 = 5
    assert offer.next_announcement(WorkerRef("p", "g")) is not None
    offer.rewind(1, has_token0=False)
    again = offer.next_announcement(WorkerRef("p", "g"))
    assert again is not None
    assert (again.block_ids, again.token0) == ([], 5)


def test_an_ended_attempt_is_never_announced_again() -> None:
    offer = make_offer(4)
    offer.reader = Reader(D)
    offer.advance(4)
    digest_ready_blocks(offer)
    offer.is_over = True
    assert offer.next_announcement(WorkerRef("p", "g")) is None
