"""How a request is split into READs."""

import pytest

from pdserve.transfer.pull import SMALL_READ_BYTES, split_into_reads

MIB = 1 << 20


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 13, 32, 125, 1000])
@pytest.mark.parametrize("block_bytes", [4096, 737_280, 3 * MIB, 20 * MIB])
def test_reads_cover_every_block_once_in_order_and_are_bounded(num_blocks, block_bytes):
    reads = split_into_reads(num_blocks, block_bytes, 8 * MIB)
    assert [index for indices in reads for index in indices] == list(range(num_blocks))
    assert all(len(indices) * block_bytes <= 8 * MIB or len(indices) == 1 for indices in reads)
    assert all(reads)


def test_the_last_reads_become_small_so_that_little_is_left_to_verify():
    assert [len(indices) for indices in split_into_reads(13, 737_280, 8 * MIB)] == [9, 3, 1]
    assert [len(indices) for indices in split_into_reads(125, 737_280, 8 * MIB)] == [11] * 10 + [10, 4, 1]


def test_what_is_small_is_one_read():
    assert [len(indices) for indices in split_into_reads(16, SMALL_READ_BYTES // 16, 8 * MIB)] == [16]
    assert [len(indices) for indices in split_into_reads(1, 20 * MIB, 8 * MIB)] == [1]
