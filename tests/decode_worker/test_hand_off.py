"""A hand-off reads every block exactly once, whatever is lost, doubled or reordered, and never a foreign one."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.decode_worker.hand_off import HandOff
from pdserve.engine.sequence import Sequence
from pdserve.errors import TransferError
from pdserve.messages import AttemptKey, KvReady
from pdserve.sampling_params import SamplingParams
from pdserve.transfer.base import Descriptor

BLOCK_SIZE = 4
KEY = AttemptKey("r", 0, 1, "nonce")
PREFILL = Descriptor(
    backend="tcp", worker_id="p", generation="g", num_blocks=64, block_bytes=8, kv_signature="s", payload=b""
)


def make_hand_off(num_prompt_tokens: int, num_cached_blocks: int = 0) -> HandOff:
    sequence = Sequence(
        key=KEY,
        prompt_token_ids=list(range(num_prompt_tokens)),
        num_original_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(seed=1, max_tokens=8),
    )
    num_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
    sequence.block_table = [500 + index for index in range(num_blocks + 1)]
    return HandOff(sequence, PREFILL, BLOCK_SIZE, num_cached_blocks, chain(num_prompt_tokens), 0.0)


def chain(num_prompt_tokens: int) -> list[bytes]:
    return [bytes([index]) * 16 for index in range(num_prompt_tokens // BLOCK_SIZE)]


def ready(num_prompt_tokens: int, first: int, end: int, *, token0: int | None = None) -> KvReady:
    num_full = min(end, num_prompt_tokens // BLOCK_SIZE)
    return KvReady(
        **KEY._asdict(),
        worker_id="p",
        generation="g",
        first_block_index=first,
        block_ids=list(range(10 + first, 10 + end)),
        digests=[index.to_bytes(16, "big", signed=True) for index in range(first, end)],
        chain_hash=chain(num_prompt_tokens)[num_full - 1] if num_full else b"",
        is_last=token0 is not None,
        token0=token0,
    )


@given(num_prompt_tokens=st.integers(1, 40), num_cached_blocks=st.integers(0, 4), seed=st.integers(0, 1000))
def test_any_order_and_number_of_announcements_reads_every_missing_block_once(
    num_prompt_tokens: int, num_cached_blocks: int, seed: int
) -> None:
    rng = random.Random(seed)
    num_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
    num_cached_blocks = min(num_cached_blocks, num_prompt_tokens // BLOCK_SIZE)
    hand_off = make_hand_off(num_prompt_tokens, num_cached_blocks)
    cuts = sorted({0, num_blocks, *(rng.randint(0, num_blocks) for _ in range(3))})
    pieces = [ready(num_prompt_tokens, a, b) for a, b in itertools.pairwise(cuts)]
    pieces.append(ready(num_prompt_tokens, num_blocks, num_blocks, token0=9))
    pieces *= 2
    rng.shuffle(pieces)
    read: list[tuple[int, int]] = []
    for number, piece in enumerate(pieces):
        wanted = hand_off.announce(piece)
        if wanted is not None:
            read += zip(wanted.remote_ids, wanted.local_ids, strict=True)
            hand_off.reads[number] = wanted.indices
            hand_off.received(number, 1, 1.0)
    assert sorted(read) == [(10 + index, 500 + index) for index in range(num_cached_blocks, num_blocks)]
    assert hand_off.is_complete
    assert hand_off.num_announced_blocks == num_blocks


def test_without_token_0_a_hand_off_is_not_complete() -> None:
    hand_off = make_hand_off(8)
    wanted = hand_off.announce(ready(8, 0, 2))
    assert wanted is not None
    hand_off.reads[1] = wanted.indices
    hand_off.received(1, 1, 1.0)
    assert not hand_off.is_complete
    hand_off.announce(ready(8, 2, 2, token0=4))
    assert hand_off.is_complete


def test_a_fully_cached_prompt_reads_nothing_and_waits_only_for_token_0() -> None:
    hand_off = make_hand_off(8, num_cached_blocks=2)
    assert hand_off.announce(ready(8, 0, 2, token0=4)) is None
    assert hand_off.is_complete


def test_blocks_of_another_prompt_are_refused() -> None:
    hand_off = make_hand_off(8)
    foreign = KvReady(
        **KEY._asdict(),
        worker_id="p",
        generation="g",
        first_block_index=0,
        block_ids=[1],
        digests=[b"d" * 16],
        chain_hash=b"f" * 16,
    )
    with pytest.raises(TransferError, match="another prompt"):
        hand_off.announce(foreign)


@pytest.mark.parametrize(("first", "end"), [(-1, 1), (1, 4), (5, 6)])
def test_blocks_outside_the_prompt_are_refused(first: int, end: int) -> None:
    hand_off = make_hand_off(8)
    with pytest.raises(TransferError, match="geometry"):
        hand_off.announce(ready(8, first, end))


@pytest.mark.parametrize("digests", [[b"d" * 16], [b"d" * 16, b"d" * 15], [b"d" * 17, b"d" * 15]])
def test_digests_that_do_not_fit_the_blocks_are_refused(digests: list[bytes]) -> None:
    message = msgspec.structs.replace(ready(8, 0, 2), digests=digests)
    with pytest.raises(TransferError, match="digest"):
        make_hand_off(8).announce(message)


def test_a_failed_hand_off_still_learns_token_0_but_reads_nothing() -> None:
    hand_off = make_hand_off(8)
    hand_off.failure = "integrity"
    assert hand_off.announce(ready(8, 0, 2, token0=6)) is None
    assert hand_off.token0 == 6
    assert not hand_off.is_complete
