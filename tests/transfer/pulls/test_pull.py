"""How a request is split into READs."""

import pytest

from pdserve.transfer.pulls.pull import split_into_reads

MIB = 1 << 20


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 13, 32, 125, 1000])
@pytest.mark.parametrize("block_bytes", [4096, 737_280, 3 * MIB, 20 * MIB])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_reads_cover_every_block_once_in_order_and_are_bounded(num_blocks, block_bytes, num_threads):
    reads = split_into_reads(num_blocks, block_bytes, 8 * MIB, num_threads=num_threads)
    assert [index for indices in reads for index in indices] == list(range(num_blocks))
    assert all(len(indices) * block_bytes <= 8 * MIB or len(indices) == 1 for indices in reads)
    assert all(reads)
    assert max(map(len, reads)) - min(map(len, reads)) <= 1
    assert len(reads) == 1 or len(reads) % num_threads == 0 or len(reads) == num_blocks


def sizes(num_blocks, max_read_bytes, num_threads):
    reads = split_into_reads(num_blocks, 737_280, max_read_bytes, num_threads=num_threads)
    return [len(indices) for indices in reads]


def test_one_thread_has_as_few_reads_as_possible():
    assert sizes(13, 8 * MIB, 1) == [7, 6]
    assert sizes(22, 8 * MIB, 1) == [11, 11]
    assert len(sizes(125, 8 * MIB, 1)) == 12


def test_threads_that_share_a_request_have_the_same_number_of_reads():
    assert sizes(13, 4 * MIB, 2) == [4, 3, 3, 3]
    assert sizes(25, 4 * MIB, 2) == [5, 4, 4, 4, 4, 4]


def test_what_is_small_is_one_read_of_one_thread():
    assert sizes(5, 4 * MIB, 2) == [5]
    assert sizes(6, 4 * MIB, 2) == [3, 3]
