import random
import threading
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_int64, c_void_p

import numpy as np
import pytest
import torch

from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.transfer.digest import (
    DIGEST_BYTES,
    block_digests,
    sums_by_kernel,
    sums_by_numpy,
    sums_on_device,
    weight_addresses,
    wrong_block_counter,
)
from pdserve.transfer.memory import bytes_view

MASK = (1 << 64) - 1
SEEDS = (0x70647365727665, 0x6B76626C6F636B)
"""Of both rows of weights."""


def split_mix(index: int, seed: int) -> int:
    z = ((index + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def digest_by_definition(block: bytes) -> bytes:
    """The definition in plain integers."""
    block += bytes(-len(block) % 8)
    sum_x = sum_y = 0
    for index in range(len(block) // 8):
        x = int.from_bytes(block[index * 8 : index * 8 + 8], "little", signed=True)
        place, run = index % 512, 512 + index // 512
        sum_x += split_mix(place, SEEDS[0]) * split_mix(run, SEEDS[0]) * x
        sum_y += split_mix(place, SEEDS[1]) * split_mix(run, SEEDS[1]) * (x ^ (x >> 32))
    return (sum_x & MASK).to_bytes(8, "little") + (sum_y & MASK).to_bytes(8, "little")


def random_blocks(num_blocks: int, block_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("block_bytes", [4, 8, 12, 1020, 4096, 8 * 32768, 8 * 32768 + 4, 8 * 40000])
def test_digest_equals_its_definition_in_plain_integers(block_bytes):
    blocks = random_blocks(3, block_bytes)
    assert block_digests(blocks, [2, 0]) == [digest_by_definition(bytes(blocks[i].tolist())) for i in (2, 0)]


@pytest.mark.parametrize("block_bytes", [4, 12, 4096, 8 * 40000 + 4])
def test_device_path_gives_the_same_digests(block_bytes):
    blocks = random_blocks(70, block_bytes) if block_bytes < 5000 else random_blocks(3, block_bytes)
    ids = list(range(len(blocks)))[::-1]
    assert [row.tobytes() for row in sums_on_device(blocks, ids)] == block_digests(blocks, ids)


needs_kernels = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))


@needs_kernels
@pytest.mark.parametrize("block_bytes", [4, 8, 12, 20, 24, 28, 8 * 1023, 8 * 1024 + 4, 8 * 1025, 8 * 40000 + 4])
def test_kernel_and_numpy_agree(block_bytes):
    blocks = random_blocks(7, block_bytes)
    ids = [6, 0, 3, 3, 1]
    assert (sums_by_kernel(blocks, ids) == sums_by_numpy(blocks, ids)).all()


EXTREME_WORDS = [0, -1, 2**63 - 1, -(2**63), 2**32 - 1, -(2**32), 2**31, -(2**31)]


@needs_kernels
def test_kernel_agrees_on_extreme_words():
    blocks = torch.tensor(EXTREME_WORDS).repeat(9, 5).view(torch.uint8).reshape(9, -1)
    assert (sums_by_kernel(blocks, [8, 2]) == sums_by_numpy(blocks, [8, 2])).all()


def sums_by(isa: str, blocks: torch.Tensor, block_ids: list[int]) -> np.ndarray:
    """What one instruction set's copy of the kernel finds, whichever is the best one here."""
    places = range(512 + -(-blocks.shape[1] // (8 * 512)))
    weights = [np.array([split_mix(place, seed) for place in places], np.uint64) for seed in SEEDS]
    ids, sums = np.array(block_ids), np.full((len(block_ids), 2), -1)
    by_isa = cpu_ops.load_library().pds_block_sums_by
    by_isa.argtypes = (c_char_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    addresses = [array.ctypes.data for array in (*weights, sums)]
    if by_isa(isa.encode(), blocks.data_ptr(), blocks.shape[1], ids.ctypes.data, len(ids), *addresses):
        pytest.skip(f"this machine has no {isa}")
    return sums


@needs_kernels
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5, 7, 9])
def test_every_instruction_set_agrees_however_many_blocks_are_walked_side_by_side(isa, num_blocks):
    for block_bytes in (4, 8, 56, 60, 64, 68, 8 * 13, 4092, 4096, 4100, 8192, 12292):
        # From an odd multiple of 4 bytes on: words need not be aligned.
        blocks = random_blocks(1, 10 * block_bytes + 4, seed=num_blocks)[0, 4:].view(10, block_bytes)
        ids = [(7 * index + 9) % 10 for index in range(num_blocks)]
        expected = [digest_by_definition(bytes(blocks[block_id].tolist())) for block_id in ids]
        assert [row.tobytes() for row in sums_by(isa, blocks, ids)] == expected, block_bytes


@needs_kernels
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_every_instruction_set_agrees_on_extreme_words(isa):
    blocks = torch.tensor(EXTREME_WORDS).repeat(9, 5).view(torch.uint8).reshape(9, -1)
    assert (sums_by(isa, blocks, [8, 2, 0]) == sums_by_numpy(blocks, [8, 2, 0])).all()


@needs_kernels
def test_an_unknown_instruction_set_digests_nothing():
    with pytest.raises(pytest.skip.Exception, match="sse9"):
        sums_by("sse9", random_blocks(2, 64), [0])


@needs_kernels
def test_kernel_reads_no_block_outside_of_the_pool():
    for wrong in (-1, 3):
        with pytest.raises(AssertionError):
            sums_by_kernel(random_blocks(3, 16), [0, wrong])


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("block_bytes", [16, 1028, 8 * 1025])
def test_wrong_blocks_are_counted(block_bytes, kernels, monkeypatch):
    monkeypatch.setenv("PDS_CPU_KERNELS", kernels)
    blocks = random_blocks(9, block_bytes)
    digests = block_digests(blocks, list(range(9)))
    count = wrong_block_counter(blocks)
    for num_ids in range(1, 10):
        ids = random.Random(num_ids).sample(range(9), num_ids)
        assert count(ids, [digests[i] for i in ids]) == 0
        for wrong in ids:
            assert count(ids, [bytes(16) if i == wrong else digests[i] for i in ids]) == 1
    blocks[4, -1] ^= 1
    assert count([3, 4, 5], digests[3:6]) == 1
    assert count([4, 4], [digests[4]] * 2) == 2


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("outside", [-1, 4, 1 << 40])
def test_blocks_outside_of_the_pool_are_not_compared(outside, kernels, monkeypatch):
    monkeypatch.setenv("PDS_CPU_KERNELS", kernels)
    with pytest.raises(IndexError):
        wrong_block_counter(random_blocks(4, 64))([0, outside], [bytes(16)] * 2)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("digests", [[], [bytes(16)], [bytes(16), bytes(15)]])
def test_every_block_needs_a_whole_digest(digests, kernels, monkeypatch):
    monkeypatch.setenv("PDS_CPU_KERNELS", kernels)
    with pytest.raises(AssertionError):
        wrong_block_counter(random_blocks(4, 64))([0, 1], digests)


def test_threads_that_ask_for_weights_first_at_the_same_time_get_the_same_ones():
    start = threading.Barrier(8)

    def ask(block_bytes):
        start.wait()
        return weight_addresses(block_bytes)

    with ThreadPoolExecutor(8) as threads:
        for number in range(50):
            block_bytes = 8 * 512 * (3_000 + number)  # nobody has asked for it yet
            assert len(set(threads.map(ask, [block_bytes] * 8))) == 1


def test_without_the_kernels_digests_are_the_same(monkeypatch):
    blocks = random_blocks(3, 1028)
    expected = block_digests(blocks, [2, 1])
    monkeypatch.setenv("PDS_CPU_KERNELS", "off")
    assert block_digests(blocks, [2, 1]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_digest_sees_bytes_whatever_the_dtype(dtype):
    raw = random_blocks(4, 2 * 3 * 2 * 16 * 8)
    typed = raw.view(dtype).reshape(4, 3, 2, 4, -1)
    assert block_digests(typed, [3, 1]) == block_digests(raw, [3, 1])
    assert bytes_view(typed).data_ptr() == typed.data_ptr()


def test_any_single_bit_change_shows():
    blocks = random_blocks(1, 1028)
    (before,) = block_digests(blocks, [0])
    for position in range(blocks.shape[1]):
        for bit in range(8):
            blocks[0, position] ^= 1 << bit
            assert block_digests(blocks, [0]) != [before], (position, bit)
            blocks[0, position] ^= 1 << bit
    assert block_digests(blocks, [0]) == [before]


def test_flipped_sign_bits_do_not_cancel_each_other_out():
    blocks = random_blocks(1, 4096)
    (before,) = block_digests(blocks, [0])
    chooser = random.Random(1)
    for num_flips in (2, 2, 2, 4, 4, 8, 64):
        changed = blocks.clone()
        for word in chooser.sample(range(512), num_flips):
            changed[0, word * 8 + 7] ^= 0x80
        assert block_digests(changed, [0]) != [before]
    negated = (-blocks.view(torch.float32)).view(torch.uint8)
    assert block_digests(negated, [0]) != [before]


def test_swapped_words_show():
    blocks = random_blocks(1, 4096)
    words = blocks.view(torch.int64).clone()
    words[0, [3, 300]] = words[0, [300, 3]]
    assert block_digests(words, [0]) != block_digests(blocks, [0])


def test_swapped_runs_of_words_show():
    blocks = random_blocks(1, 4 * 4096)
    runs = blocks.view(4, 4096)[[0, 3, 2, 1]].reshape(1, -1)
    assert block_digests(runs, [0]) != block_digests(blocks, [0])


def test_different_blocks_have_different_digests():
    blocks = random_blocks(2000, 64)
    digests = block_digests(blocks, list(range(2000)))
    assert len(set(digests)) == 2000
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_no_blocks_no_digests():
    assert block_digests(random_blocks(1, 8), []) == []
