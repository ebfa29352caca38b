"""Paged attention of sequences that decode: one query each over a long context (split-KV, grouped query heads).

A context is cut into splits of SPLIT_TOKENS; each program attends one split for all query heads of one KV head,
and a second kernel merges a row's splits in order. Splits begin at fixed positions, so a row's result depends on
its own context alone: bit-equal in any batch. Bound by memory: each key and value is read once.

Source: split-KV decoding after Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import IS_INTERPRETED, LOG2_E, check_float, dot_precision, next_power_of_2
from pdserve.kernels.splits import SPLIT_TOKENS, num_splits

MAX_WINDOW = 1 << 30
"""The window, in tokens, that stands for no sliding window."""


@triton.jit(
    do_not_specialize=["window", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=["block_tables_ptr", "context_lens_ptr"],
)
def paged_decode_kernel(
    query_ptr,  # [num_seqs, num_heads, head_dim]
    kv_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], strided
    block_tables_ptr,  # int32 [num_seqs, max_num_blocks]
    context_lens_ptr,  # int32 [num_seqs]
    output_ptr,  # [num_seqs, num_heads, head_dim]; written when IS_SINGLE
    partial_ptr,  # fp32 [num_seqs, num_heads, num_splits, head_dim]: weighted sums of values
    peaks_ptr,  # fp32 [num_seqs, num_heads, num_splits]: largest score, in powers of two
    totals_ptr,  # fp32 [num_seqs, num_heads, num_splits]: sum of weights
    scaling,
    softcap,
    window,
    query_stride_seq,
    query_stride_head,
    kv_stride_block,
    kv_stride_part,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One program: one sequence, the GROUP query heads of one KV head, one split."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + sequence)
    first_visible = tl.maximum(context_len - window, 0)
    begin = tl.maximum(split * SPLIT, first_visible // TILE * TILE)
    end = tl.minimum(split * SPLIT + SPLIT, context_len)
    member = tl.arange(0, GROUP_P2)
    head = kv_head * GROUP + member
    column = tl.arange(0, HEAD_DIM_P2)
    is_value = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    row = sequence.to(tl.int64)
    query_place = query_ptr + row * query_stride_seq + head[:, None] * query_stride_head + column[None, :]
    query = tl.load(query_place, mask=is_value, other=0.0)
    peak = tl.full((GROUP_P2,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_P2,), tl.float32)
    mixed = tl.zeros((GROUP_P2, HEAD_DIM_P2), tl.float32)
    table = block_tables_ptr + row * table_stride
    kv_start = kv_ptr + kv_head * kv_stride_head
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_seen = (position < context_len) & (position >= first_visible)
        block = tl.load(table + position // BLOCK_SIZE, mask=position < context_len, other=0).to(tl.int64)
        slot = kv_start + block * kv_stride_block + (position % BLOCK_SIZE) * kv_stride_slot
        place = slot[:, None] + column[None, :]
        is_loaded = (position < context_len)[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(place, mask=is_loaded, other=0.0)
        score = tl.dot(query, tl.trans(key).to(query.dtype), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = tl.where(is_seen[None, :], score * SCALE, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A tile that begins before the window may hold nothing visible yet.
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe_peak[:, None])
        decay = tl.exp2(peak - safe_peak)
        value = tl.load(place + kv_stride_part, mask=is_loaded, other=0.0).to(query.dtype)
        mixed = mixed * decay[:, None] + tl.dot(weight.to(query.dtype), value, input_precision=PRECISION)
        total = total * decay + tl.sum(weight, 1)
        peak = new_peak
    result = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    if IS_SINGLE:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output_ptr + result, mixed.to(output_ptr.dtype.element_ty), mask=is_value)
    elif begin < end:
        scalar = (row * NUM_HEADS + head) * num_splits + split
        tl.store(peaks_ptr + scalar, peak, mask=member < GROUP)
        tl.store(totals_ptr + scalar, total, mask=member < GROUP)
        tl.store(partial_ptr + scalar[:, None] * HEAD_DIM + column[None, :], mixed, mask=is_value)


@triton.jit(do_not_specialize=["window", "num_splits"], do_not_specialize_on_alignment=["context_lens_ptr"])
def merge_splits_kernel(
    partial_ptr,  # fp32 [num_seqs, num_heads, num_splits, head_dim]
    peaks_ptr,  # fp32 [num_seqs, num_heads, num_splits]
    totals_ptr,  # fp32 [num_seqs, num_heads, num_splits]
    context_lens_ptr,  # int32 [num_seqs]
    output_ptr,  # [num_seqs, num_heads, head_dim]
    window,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_P2: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program: one sequence and query head; its splits in order."""
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    context_len = tl.load(context_lens_ptr + tl.program_id(0))
    first = tl.maximum(context_len - window, 0) // SPLIT
    last = tl.cdiv(context_len, SPLIT)
    column = tl.arange(0, HEAD_DIM_P2)
    mask = column < HEAD_DIM
    mixed = tl.zeros((HEAD_DIM_P2,), tl.float32)
    highest = float("-inf")
    sum_of_weights = 0.0
    for split in range(first, last):
        place = row * num_splits + split
        peak = tl.load(peaks_ptr + place)
        new_highest = tl.maximum(highest, peak)
        decay = tl.exp2(highest - new_highest)
        scale = tl.exp2(peak - new_highest)
        mixed = mixed * decay + scale * tl.load(partial_ptr + place * HEAD_DIM + column, mask=mask, other=0.0)
        sum_of_weights = sum_of_weights * decay + scale * tl.load(totals_ptr + place)
        highest = new_highest
    result = mixed / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(output_ptr + row * HEAD_DIM + column, result.to(output_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How one program is laid out."""

    tokens: int
    """Number of tokens whose keys and values are read at once; divides SPLIT_TOKENS."""
    num_warps: int
    num_stages: int


INTERPRETED_TILE = DecodeTile(tokens=128, num_warps=4, num_stages=1)
"""The interpreter's time goes by the number of operations, not by their size."""


def tile_for(head_dim: int, itemsize: int) -> DecodeTile:
    """Tile that was seen to compile without spilling registers, for sm_80 and sm_90 alike.

    Args:
        head_dim: of the model.
        itemsize: bytes of one value of the query.
    """
    if IS_INTERPRETED:
        return INTERPRETED_TILE
    padded = next_power_of_2(head_dim)
    if itemsize > 2:
        return DecodeTile(tokens=32 if padded <= 128 else 16, num_warps=8, num_stages=2)
    return DecodeTile(tokens=64 if padded <= 128 else 32, num_warps=4, num_stages=3)


def paged_decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    max_context_len: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one query per sequence over the paged KV cache, which holds the query's own KV already.

    Args:
        query: `[num_seqs, num_heads, head_dim]`; num_heads is a multiple of num_kv_heads.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        block_tables: int32 `[num_seqs, max_num_blocks]`, contiguous rows.
        context_lens: int32 `[num_seqs]`, the query's own token included; 0 gives a row of zeros.
        max_context_len: none of `context_lens` is above it.
        scaling: factor on the scores.
        sliding_window: a query sees its own and the `sliding_window - 1` tokens before; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.

    Returns:
        `[num_seqs, num_heads, head_dim]` in the query's dtype, contiguous.
    """
    check_float(query=query, kv_layer=kv_layer)
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    assert group * num_kv_heads == num_heads, f"{num_heads} query heads over {num_kv_heads} KV heads"
    assert block_tables.dtype == context_lens.dtype == torch.int32, (block_tables.dtype, context_lens.dtype)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return output
    count = num_splits(max_context_len)
    is_single = count == 1
    window = MAX_WINDOW if sliding_window is None else sliding_window
    partial, peaks, totals = (output,) * 3 if is_single else _partials(num_seqs, num_heads, count, query)
    tile = tile_for(head_dim, query.element_size())
    shape = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "HEAD_DIM_P2": max(16, next_power_of_2(head_dim))}
    paged_decode_kernel[(num_seqs, num_kv_heads, count)](
        query,
        kv_layer,
        block_tables,
        context_lens,
        output,
        partial,
        peaks,
        totals,
        scaling,
        softcap or 0.0,
        window,
        *query.stride()[:2],
        *kv_layer.stride()[:4],
        block_tables.stride(0),
        count,
        **shape,
        GROUP=group,
        GROUP_P2=max(16, next_power_of_2(group)),
        BLOCK_SIZE=kv_layer.shape[2],
        SPLIT=SPLIT_TOKENS,
        TILE=tile.tokens,
        HAS_SOFTCAP=softcap is not None,
        IS_SINGLE=is_single,
        PRECISION=dot_precision(query.dtype),
        SCALE=LOG2_E,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if not is_single:
        merge_splits_kernel[(num_seqs, num_heads)](
            partial, peaks, totals, context_lens, output, window, count, **shape, SPLIT=SPLIT_TOKENS, num_warps=1
        )
    return output


def _partials(num_seqs: int, num_heads: int, count: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mixed = torch.empty(num_seqs, num_heads, count, like.shape[2], dtype=torch.float32, device=like.device)
    scalars = torch.empty(2, num_seqs, num_heads, count, dtype=torch.float32, device=like.device)
    return mixed, scalars[0], scalars[1]
