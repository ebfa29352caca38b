"""How a request is split into READs."""

import pytest

from pdserve.transfer.pull import SHORT_TAIL_BYTES, split_into_reads

MIB = 1 << 20


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 13, 32, 125, 1000])
@pytest.mark.parametrize("block_bytes", [4096, 737_280, 3 * MIB, 20 * MIB])
@pytest.mark.parametrize("is_verified", [False, True])
def test_reads_cover_every_block_once_in_order_and_are_bounded(num_blocks, block_bytes, is_verified):
    reads = split_into_reads(num_blocks, block_bytes, 8 * MIB, is_verified=is_verified)
    assert [index for indices in reads for index in indices] == list(range(num_blocks))
    assert all(len(indices) * block_bytes <= 8 * MIB or len(indices) == 1 for indices in reads)
    assert all(reads)


def sizes(num_blocks, block_bytes, is_verified):
    return [len(indices) for indices in split_into_reads(num_blocks, block_bytes, 8 * MIB, is_verified=is_verified)]


def test_the_last_reads_become_small_so_that_little_is_left_to_verify():
    assert sizes(13, 737_280, is_verified=True) == [9, 4]
    assert sizes(125, 737_280, is_verified=True) == [11] * 10 + [10, 4, 1]


def test_without_verification_there_are_as_few_reads_as_possible():
    assert sizes(13, 737_280, is_verified=False) == [11, 2]
    assert sizes(125, 737_280, is_verified=False) == [11] * 11 + [4]


def test_what_is_small_is_one_read():
    assert sizes(16, SHORT_TAIL_BYTES // 16, is_verified=True) == [16]
    assert sizes(1, 20 * MIB, is_verified=True) == [1]
