import threading
import time

import pytest
import torch

from pdserve.kernels import cpu_ops
from pdserve.transfer.digest import block_digests
from pdserve.transfer.verifier import NativeVerifier, ThreadVerifier, Verdict, create_verifier

needs_kernels = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))


@pytest.fixture
def blocks():
    return torch.arange(40, dtype=torch.uint8).reshape(5, 8).repeat(1, 100)


@pytest.fixture
def large_blocks():
    return torch.arange(9, dtype=torch.uint8).repeat_interleave(1 << 20).reshape(9, 1 << 20)


@pytest.fixture(params=["thread", pytest.param("native", marks=needs_kernels)])
def create(request):
    """Makes verifiers of either kind and closes them."""
    made = []

    def make(blocks):
        verifier = ThreadVerifier(blocks, lambda: None) if request.param == "thread" else NativeVerifier(blocks)
        made.append(verifier)
        return verifier

    yield make
    for verifier in made:
        verifier.close()


def verdicts(verifier, count):
    found, until_s = [], time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < until_s, found
        if not verifier.help():
            time.sleep(0.001)
        found += verifier.take()
    return sorted(found, key=lambda verdict: verdict.tag)


def test_verdicts_count_wrong_blocks(create, blocks):
    verifier = create(blocks)
    digests = block_digests(blocks, [0, 1, 2])
    blocks[1, 7] ^= 1
    verifier.begin("first", [0, 1, 2], digests)
    verifier.begin("second", [2, 0], [digests[2], digests[0]])
    assert verdicts(verifier, 2) == [Verdict("first", 3, 1), Verdict("second", 2, 0)]
    assert verifier.take() == []


@pytest.mark.parametrize("is_last", [False, True])
def test_every_wrong_block_counts_once_however_they_are_divided(create, large_blocks, is_last):
    digests = block_digests(large_blocks, list(range(9)))
    for block_id in (0, 3, 4, 8):
        large_blocks[block_id, -1] ^= 1
    verifier = create(large_blocks)
    verifier.expect()
    for number in range(20):
        verifier.begin(number, list(range(9)), digests, is_last=is_last)
    assert verdicts(verifier, 20) == [Verdict(number, 9, 4) for number in range(20)]


def test_a_digest_wrong_in_either_half_is_noticed(create, blocks):
    verifier = create(blocks)
    (digest,) = block_digests(blocks, [3])
    for number, place in enumerate((0, 7, 8, 15)):
        wrong = bytearray(digest)
        wrong[place] ^= 1
        verifier.begin(number, [3], [bytes(wrong)])
    verifier.begin(4, [3], [digest])
    assert [verdict.num_wrong for verdict in verdicts(verifier, 5)] == [1, 1, 1, 1, 0]


def test_the_thread_works_while_its_owner_does_something_else(create, large_blocks):
    verifier = create(large_blocks)
    digests = block_digests(large_blocks, list(range(9)))
    verifier.begin("alone", list(range(9)), digests)
    found, until_s = [], time.monotonic() + 10
    while not found:
        assert time.monotonic() < until_s
        time.sleep(0.01)
        found = verifier.take()
    assert found == [Verdict("alone", 9, 0)]


def test_a_thread_that_fell_asleep_is_woken_up(create, blocks):
    verifier = create(blocks)
    digests = block_digests(blocks, [0])
    for number in range(5):
        time.sleep(0.01)
        verifier.begin(number, [0], digests)
        time.sleep(0.05)
        assert verdicts(verifier, 1) == [Verdict(number, 1, 0)]


def test_closing_in_the_middle_of_everything_is_quick_and_again_harmless(create, large_blocks):
    verifier = create(large_blocks)
    digests = block_digests(large_blocks, list(range(9)))
    for number in range(20):
        verifier.begin(number, list(range(9)), digests)
    verifier.close()
    verifier.close()
    create(large_blocks).close()


def test_expecting_from_other_threads_while_blocks_are_compared(create, large_blocks):
    verifier = create(large_blocks)
    digests = block_digests(large_blocks, list(range(9)))
    is_over = threading.Event()

    def expect():
        while not is_over.wait(0.0005):
            verifier.expect()

    threads = [threading.Thread(target=expect) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            verifier.begin(number, list(range(9)), digests, is_last=number % 3 == 0)
        assert len(verdicts(verifier, 20)) == 20
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_blocks_that_cannot_be_compared_are_all_wrong_and_the_next_ones_are_compared(blocks):
    is_new = threading.Event()
    verifier = ThreadVerifier(blocks, is_new.set)
    (digest,) = block_digests(blocks, [4])
    verifier.begin("outside", [5, 4], [digest, digest])
    verifier.begin("within", [4], [digest])
    outside, within = verdicts(verifier, 2)
    assert is_new.is_set()
    assert (outside.num_blocks, outside.num_wrong, bool(outside.failure)) == (2, 2, True)
    assert within == Verdict("within", 1, 0)
    verifier.close()


@needs_kernels
@pytest.mark.parametrize("outside", [-1, 5, 2**40])
def test_kernels_read_nothing_outside_of_the_pool(blocks, outside):
    verifier = NativeVerifier(blocks)
    (digest,) = block_digests(blocks, [4])
    with pytest.raises(IndexError, match=str(outside)):
        verifier.begin("outside", [4, outside], [digest, digest])
    verifier.begin("within", [4], [digest])
    assert verdicts(verifier, 1) == [Verdict("within", 1, 0)]
    verifier.close()


@needs_kernels
def test_kernels_are_used_where_there_are_some(blocks, monkeypatch):
    verifiers = [create_verifier(blocks, lambda: None)]
    monkeypatch.setenv("PDS_CPU_KERNELS", "off")
    verifiers.append(create_verifier(blocks, lambda: None))
    assert [type(verifier) for verifier in verifiers] == [NativeVerifier, ThreadVerifier]
    for verifier in verifiers:
        verifier.close()
