"""Paged attention of packed prompt chunks: causal, of any lengths, with sliding window and soft-cap.

Each program attends one tile of queries of one sequence and head over the KV before and in it, online-softmax
style. Tiles without an edge (causal, window, end of context) skip the mask. Bound by tensor cores.

Source: Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import IS_INTERPRETED, LOG2_E, capability, cdiv, check_float, dot_precision, next_power_of_2


@triton.jit
def _attend(
    query,
    position,
    begin,
    end,
    peak,
    total,
    mixed,
    table,
    kv_start,
    context_len,
    window,
    scaling,
    softcap,
    kv_stride_block,
    kv_stride_part,
    kv_stride_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The online softmax over KV positions [begin, end)."""
    column = tl.arange(0, HEAD_DIM_P2)
    for start in range(begin, end, TILE):
        key_position = start + tl.arange(0, TILE)
        is_real = key_position < context_len
        if IS_MASKED:
            block = tl.load(table + key_position // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64)
        else:
            block = tl.load(table + key_position // BLOCK_SIZE).to(tl.int64)
        slot = kv_start + block * kv_stride_block + (key_position % BLOCK_SIZE) * kv_stride_slot
        place = slot[:, None] + column[None, :]
        if IS_MASKED or HEAD_DIM != HEAD_DIM_P2:
            is_loaded = (is_real | (not IS_MASKED))[:, None] & (column < HEAD_DIM)[None, :]
            key = tl.load(place, mask=is_loaded, other=0.0)
            value = tl.load(place + kv_stride_part, mask=is_loaded, other=0.0).to(query.dtype)
        else:
            key = tl.load(place)
            value = tl.load(place + kv_stride_part).to(query.dtype)
        score = tl.dot(query, tl.trans(key).to(query.dtype), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = score * SCALE
        if IS_MASKED:
            is_seen = key_position[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (key_position[None, :] > position[:, None] - window)
            score = tl.where(is_seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak) if IS_MASKED else new_peak
        weight = tl.exp2(score - safe_peak[:, None])
        decay = tl.exp2(peak - safe_peak)
        mixed = mixed * decay[:, None]
        mixed += tl.dot(weight.to(query.dtype), value, input_precision=PRECISION)
        total = total * decay + tl.sum(weight, 1)
        peak = new_peak
    return peak, total, mixed


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr", "block_tables_ptr"],
)
def paged_prefill_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    kv_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], strided
    query_starts_ptr,  # int32 [num_seqs + 1]
    context_lens_ptr,  # int32 [num_seqs]
    block_tables_ptr,  # int32 [num_seqs, max_num_blocks]
    output_ptr,  # [num_tokens, num_heads, head_dim]
    scaling,
    softcap,
    window,
    query_stride_token,
    query_stride_head,
    kv_stride_block,
    kv_stride_part,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One program: QUERIES queries of one sequence and head. Later tiles see more, so they start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - first_row
    if tile * QUERIES >= num_queries:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    index = tile * QUERIES + tl.arange(0, QUERIES)
    first_position = context_len - num_queries + tile * QUERIES
    position = first_position + tl.arange(0, QUERIES)
    column = tl.arange(0, HEAD_DIM_P2)
    is_value = (index < num_queries)[:, None] & (column < HEAD_DIM)[None, :]
    row = (first_row + index).to(tl.int64)[:, None]
    query = tl.load(
        query_ptr + row * query_stride_token + head * query_stride_head + column[None, :], mask=is_value, other=0.0
    )
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, HEAD_DIM_P2), tl.float32)
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride
    kv_start = kv_ptr + (head // GROUP) * kv_stride_head
    end = tl.minimum(first_position + QUERIES, context_len)
    begin = 0
    unmasked_end = (first_position + 1) // TILE * TILE
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        unmasked_end = begin
    if not HAS_WINDOW:
        peak, total, mixed = _attend(
            query, position, begin, unmasked_end, peak, total, mixed, table, kv_start, context_len, window,
            scaling, softcap, kv_stride_block, kv_stride_part, kv_stride_slot, HEAD_DIM, HEAD_DIM_P2, BLOCK_SIZE,
            TILE, HAS_WINDOW, HAS_SOFTCAP, False, PRECISION, SCALE,
        )  # fmt: skip
    peak, total, mixed = _attend(
        query, position, unmasked_end, end, peak, total, mixed, table, kv_start, context_len, window,
        scaling, softcap, kv_stride_block, kv_stride_part, kv_stride_slot, HEAD_DIM, HEAD_DIM_P2, BLOCK_SIZE,
        TILE, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION, SCALE,
    )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = output_ptr + (row * NUM_HEADS + head) * HEAD_DIM + column[None, :]
    tl.store(place, mixed.to(output_ptr.dtype.element_ty), mask=is_value)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """How one program is laid out."""

    queries: int
    tokens: int
    """Number of tokens whose keys and values are read at once."""
    num_warps: int
    num_stages: int


INTERPRETED_TILE = PrefillTile(queries=128, tokens=128, num_warps=4, num_stages=1)
"""The interpreter's time goes by the number of operations, not by their size."""


def tile_for(head_dim: int, itemsize: int, capability: int) -> PrefillTile:
    """Largest tile that was seen to compile without spilling registers.

    Args:
        head_dim: of the model.
        itemsize: bytes of one value of the query.
        capability: of the GPU, 90 for 9.0. Hopper keeps operands of its products in shared memory.
    """
    if IS_INTERPRETED:
        return INTERPRETED_TILE
    padded = next_power_of_2(head_dim)
    is_hopper = capability >= 90
    if itemsize > 2:
        return PrefillTile(queries=16, tokens=16, num_warps=4, num_stages=2)
    if padded <= 64:
        return PrefillTile(queries=128, tokens=64, num_warps=8, num_stages=3)
    if padded <= 128:
        return PrefillTile(queries=128, tokens=64 if is_hopper else 32, num_warps=8, num_stages=3 if is_hopper else 2)
    return PrefillTile(queries=128 if is_hopper else 64, tokens=32, num_warps=8, num_stages=2)


def paged_prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    max_query_len: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of packed sequences over the paged KV cache, which holds the batch's own KV already.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; num_heads is a multiple of num_kv_heads.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        query_starts: int32 `[num_seqs + 1]`: sequence i's queries are rows [query_starts[i], query_starts[i + 1]).
        context_lens: int32 `[num_seqs]`: tokens in the KV cache; the queries are the last of them.
        block_tables: int32 `[num_seqs, max_num_blocks]`, contiguous rows.
        max_query_len: no sequence has more queries.
        scaling: factor on the scores.
        sliding_window: a query sees its own and the `sliding_window - 1` tokens before; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.

    Returns:
        `[num_tokens, num_heads, head_dim]` in the query's dtype, contiguous.
    """
    check_float(query=query, kv_layer=kv_layer)
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = context_lens.shape[0], kv_layer.shape[3]
    group = num_heads // num_kv_heads
    assert group * num_kv_heads == num_heads, f"{num_heads} query heads over {num_kv_heads} KV heads"
    assert query_starts.dtype == context_lens.dtype == block_tables.dtype == torch.int32
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return output
    tile = tile_for(head_dim, query.element_size(), capability(query.device))
    paged_prefill_kernel[(cdiv(max_query_len, tile.queries), num_heads, num_seqs)](
        query,
        kv_layer,
        query_starts,
        context_lens,
        block_tables,
        output,
        scaling,
        softcap or 0.0,
        sliding_window or 0,
        *query.stride()[:2],
        *kv_layer.stride()[:4],
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_P2=max(16, next_power_of_2(head_dim)),
        BLOCK_SIZE=kv_layer.shape[2],
        QUERIES=tile.queries,
        TILE=tile.tokens,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype),
        SCALE=LOG2_E,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output
