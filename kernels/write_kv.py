"""Writes a step's keys and values into their KV slots; with RoPE, also rotates queries and keys on the way.

Bound by memory: queries, keys and values are read once and written once, and nothing lies between the QKV
projection and the attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import IS_INTERPRETED, cdiv, check_float, next_power_of_2

TOKENS = 128 if IS_INTERPRETED else 16
"""Tokens of one program, of one head: many, where interpreted, whose time goes by the number of operations."""


@triton.jit
def _rotate_half(start_ptr, cos_ptr, sin_ptr, mask, HALF: tl.constexpr):
    """Both halves of a rotated tile [TOKENS, HALF_P2], in the type it was stored in."""
    stored = tl.load(start_ptr, mask=mask, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(start_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    # cos and sin hold the same angles in both halves.
    cos = tl.load(cos_ptr, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr, mask=mask, other=0.0).to(tl.float32)
    return (first * cos - second * sin).to(stored.dtype), (second * cos + first * sin).to(stored.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]; not read without RoPE
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # [num_tokens, num_kv_heads, head_dim]
    cos_ptr,  # [num_tokens, head_dim]
    sin_ptr,  # [num_tokens, head_dim]
    rotated_ptr,  # [num_tokens, num_heads, head_dim], contiguous
    kv_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], strided
    slots_ptr,  # int64 [num_tokens]; below 0: nothing is written
    num_tokens,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    kv_stride_block,
    kv_stride_part,
    kv_stride_slot,
    kv_stride_head,
    NUM_HEADS: tl.constexpr,  # 0 without RoPE
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """One program: TOKENS tokens of one query head (only with RoPE), or of one KV head."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    column = tl.arange(0, HALF_P2)[None, :]
    is_token = token < num_tokens
    mask = is_token[:, None] & (column < HALF)
    row = token.to(tl.int64)[:, None]
    angle = row * (2 * HALF) + column
    if head < NUM_HEADS:
        start = query_ptr + row * query_stride_token + head * query_stride_head + column
        first, second = _rotate_half(start, cos_ptr + angle, sin_ptr + angle, mask, HALF)
        place = rotated_ptr + (row * NUM_HEADS + head) * (2 * HALF) + column
        tl.store(place, first, mask=mask)
        tl.store(place + HALF, second, mask=mask)
    else:
        head -= NUM_HEADS
        slot = tl.load(slots_ptr + token, mask=is_token, other=-1)[:, None]
        is_written = mask & (slot >= 0)
        place = kv_ptr + (slot // BLOCK_SIZE) * kv_stride_block + (slot % BLOCK_SIZE) * kv_stride_slot
        place += head * kv_stride_head + column
        start = key_ptr + row * key_stride_token + head * key_stride_head + column
        if HAS_ROPE:
            first, second = _rotate_half(start, cos_ptr + angle, sin_ptr + angle, mask, HALF)
        else:
            first = tl.load(start, mask=mask, other=0.0)
            second = tl.load(start + HALF, mask=mask, other=0.0)
        kv_type = kv_ptr.dtype.element_ty
        tl.store(place, first.to(kv_type), mask=is_written)
        tl.store(place + HALF, second.to(kv_type), mask=is_written)
        start = value_ptr + row * value_stride_token + head * value_stride_head + column
        place += kv_stride_part
        tl.store(place, tl.load(start, mask=mask, other=0.0).to(kv_type), mask=is_written)
        tl.store(place + HALF, tl.load(start + HALF, mask=mask, other=0.0).to(kv_type), mask=is_written)


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of a packed batch into their slots, in the cache's dtype.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, after RoPE.
        value: `[num_tokens, num_kv_heads, head_dim]`.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        slot_mapping: int64 `[num_tokens]`; a token whose slot is below 0 is not written.
    """
    _launch(None, key, value, None, None, key, kv_layer, slot_mapping)


def rope_and_write_kv(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Rotate queries and keys, write keys and values into their slots.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, before RoPE.
        key: `[num_tokens, num_kv_heads, head_dim]`, before RoPE.
        value: `[num_tokens, num_kv_heads, head_dim]`.
        cos: `[num_tokens, head_dim]`, contiguous, of each token's position; the second half repeats the first.
        sin: the same.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        slot_mapping: int64 `[num_tokens]`; a token whose slot is below 0 is not written.

    Returns:
        The rotated queries `[num_tokens, num_heads, head_dim]`, contiguous.
    """
    assert cos.shape == sin.shape == (query.shape[0], query.shape[2]), (cos.shape, sin.shape, query.shape)
    assert cos.is_contiguous(), cos.stride()
    assert sin.is_contiguous(), sin.stride()
    check_float(query=query, cos=cos, sin=sin)
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(query, key, value, cos, sin, rotated, kv_layer, slot_mapping)
    return rotated


def _launch(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
) -> None:
    check_float(key=key, value=value, kv_layer=kv_layer)
    num_tokens, num_kv_heads, head_dim = key.shape
    assert head_dim % 2 == 0, f"head_dim {head_dim} is odd"
    assert kv_layer.shape[3:] == key.shape[1:] == value.shape[1:], (kv_layer.shape, key.shape, value.shape)
    assert slot_mapping.shape == (num_tokens,), (slot_mapping.shape, num_tokens)
    if num_tokens == 0:
        return
    num_heads = 0 if query is None else query.shape[1]
    queries = key if query is None else query
    write_kv_kernel[(cdiv(num_tokens, TOKENS), num_heads + num_kv_heads)](
        queries,
        key,
        value,
        key if cos is None else cos,
        key if sin is None else sin,
        rotated,
        kv_layer,
        slot_mapping,
        num_tokens,
        *queries.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_layer.stride()[:4],
        NUM_HEADS=num_heads,
        BLOCK_SIZE=kv_layer.shape[2],
        HALF=head_dim // 2,
        HALF_P2=next_power_of_2(head_dim // 2),
        TOKENS=TOKENS,
        HAS_ROPE=query is not None,
    )
