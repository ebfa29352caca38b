"""The digest of KV blocks on a GPU: the same 128 bits as transfer/digest.py computes on a CPU, which defines it.

Sums of products modulo 2**64 do not depend on their order, so programs add up their parts with atomics. Each
program makes the weights of its words once and uses them for several blocks. Bound by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.gather_blocks import words_of
from pdserve.kernels.launch import cdiv

TILE_WORDS = 1024
"""Number of 64-bit words that one program reads at a time."""
BLOCKS = 8
"""Number of blocks of one program, which share the cost of the weights."""


@triton.jit
def _weights(word, seed):
    """Each word's weight: that of its place in a run of 512 words, times that of the run."""
    return _split_mix(word % 512, seed) * _split_mix(512 + word // 512, seed)


@triton.jit
def _split_mix(position, seed):
    """SplitMix64 of a position, made odd."""
    z = (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + seed
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["num_chosen"], do_not_specialize_on_alignment=["block_ids_ptr"])
def block_digest_kernel(
    pool_ptr,  # int32 [num_blocks, num_halves]
    block_ids_ptr,  # int64 [num_chosen]
    sums_ptr,  # int64 [num_chosen, 2], zero before
    num_chosen,
    num_halves,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """One program: TILE words of BLOCKS blocks. IS_WHOLE: blocks are whole 64-bit words, and aligned."""
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    weight_x = _weights(word, 0x70647365727665)
    weight_y = _weights(word, 0x6B76626C6F636B)
    first = tl.program_id(1) * BLOCKS
    for index in range(first, tl.minimum(first + BLOCKS, num_chosen)):
        block = pool_ptr + tl.load(block_ids_ptr + index) * num_halves
        if IS_WHOLE:
            x = tl.load(block.to(tl.pointer_type(tl.int64)) + word, mask=word < num_halves // 2, other=0)
        else:
            low = tl.load(block + 2 * word, mask=2 * word < num_halves, other=0).to(tl.int64) & 0xFFFFFFFF
            high = tl.load(block + 2 * word + 1, mask=2 * word + 1 < num_halves, other=0).to(tl.int64)
            x = (high << 32) | low
        y = x ^ (x >> 32)
        tl.atomic_add(sums_ptr + 2 * index, tl.sum(weight_x * x), sem="relaxed")
        tl.atomic_add(sums_ptr + 2 * index + 1, tl.sum(weight_y * y), sem="relaxed")


def block_digest(kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """Both 64-bit sums over the words of each block.

    Args:
        kv_cache: `[num_blocks, …]`, contiguous; a block has a multiple of 4 bytes.
        block_ids: int64 `[num_chosen]`.

    Returns:
        int64 `[num_chosen, 2]`.
    """
    pool = words_of(kv_cache)
    assert block_ids.dtype is torch.int64, block_ids.dtype
    sums = torch.zeros(len(block_ids), 2, dtype=torch.int64, device=pool.device)
    if len(block_ids) == 0:
        return sums
    num_halves = pool.shape[1]
    grid = (cdiv(num_halves, 2 * TILE_WORDS), cdiv(len(block_ids), BLOCKS))
    is_whole = num_halves % 2 == 0 and pool.data_ptr() % 8 == 0
    block_digest_kernel[grid](
        pool, block_ids, sums, len(block_ids), num_halves, TILE=TILE_WORDS, BLOCKS=BLOCKS, IS_WHOLE=is_whole
    )
    return sums
