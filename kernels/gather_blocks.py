"""Copies KV blocks that lie anywhere in the pool into one piece of memory, and back: for copies to and from a host.

Many blocks then cross the bus as one large copy. Bound by memory. Nothing calls it yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import cdiv

TILE_WORDS = 4096
"""32-bit words of one program: 16 KiB."""


@triton.jit(do_not_specialize_on_alignment=["block_ids_ptr"])
def gather_blocks_kernel(
    pool_ptr,  # int32 [num_blocks, num_words]
    block_ids_ptr,  # int64 [num_chosen]
    packed_ptr,  # int32 [num_chosen, num_words]
    num_words,
    TILE: tl.constexpr,
    IS_SCATTER: tl.constexpr,
):
    """One program: TILE words of one block."""
    index = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids_ptr + index)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_pool = pool_ptr + block_id * num_words + word
    in_packed = packed_ptr + index * num_words + word
    if IS_SCATTER:
        tl.store(in_pool, tl.load(in_packed, mask=word < num_words), mask=word < num_words)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=word < num_words), mask=word < num_words)


def gather_blocks(kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """The bytes of some blocks, end to end.

    Args:
        kv_cache: `[num_blocks, …]`, contiguous; a block has a multiple of 4 bytes.
        block_ids: int64 `[num_chosen]`.

    Returns:
        uint8 `[num_chosen, block_bytes]`.
    """
    pool = words_of(kv_cache)
    packed = torch.empty(len(block_ids), pool.shape[1], dtype=torch.int32, device=pool.device)
    _launch(pool, block_ids, packed, is_scatter=False)
    return packed.view(torch.uint8)


def scatter_blocks(packed: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
    """The way back: uint8 `[num_chosen, block_bytes]` into the blocks `block_ids`, which differ from each other."""
    _launch(words_of(kv_cache), block_ids, packed.view(torch.int32), is_scatter=True)


def words_of(kv_cache: Tensor) -> Tensor:
    """int32 `[num_blocks, num_words]` over the same memory."""
    assert kv_cache.is_contiguous(), f"the KV cache of shape {tuple(kv_cache.shape)} is not contiguous"
    rows = kv_cache.detach().reshape(kv_cache.shape[0], -1).view(torch.uint8)
    assert rows.shape[1] % 4 == 0, f"a block has {rows.shape[1]} bytes, not a multiple of 4"
    return rows.view(torch.int32)


def _launch(pool: Tensor, block_ids: Tensor, packed: Tensor, *, is_scatter: bool) -> None:
    assert block_ids.dtype is torch.int64, block_ids.dtype
    assert packed.shape == (len(block_ids), pool.shape[1]), (packed.shape, len(block_ids), pool.shape)
    if len(block_ids) == 0:
        return
    grid = (len(block_ids), cdiv(pool.shape[1], TILE_WORDS))
    gather_blocks_kernel[grid](pool, block_ids, packed, pool.shape[1], TILE=TILE_WORDS, IS_SCATTER=is_scatter)
