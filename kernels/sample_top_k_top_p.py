"""Draws the next token of each row: top-k, top-p and min-p, then the inverse of the cumulative distribution.

Nothing is sorted. The smallest logit that all filters keep is found by bisection over the ordered bits of the
logits (32 passes over a row that stays in the L2 cache), for top-k by counting what lies above, for top-p by its
mass. Then tokens are summed in the order of their ids until the row's uniform number is passed. A row depends on
itself alone. Greedy rows take the largest logit, the lowest id among equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import LOG2_E, next_power_of_2

TILE_TOKENS = 2048


@triton.jit
def _ordered(value):
    """int32 whose order is that of the float32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _mass_above(row_ptr, threshold, floor, best, inverse_temperature, vocab_size, TILE: tl.constexpr):
    """Number and probability mass (relative to the best) of logits above `threshold` and at least `floor`."""
    count = 0
    mass = 0.0
    for start in range(0, vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        key = _ordered(logit)
        is_above = (key > threshold) & (key >= floor) & (token < vocab_size)
        count += tl.sum(is_above.to(tl.int32))
        mass += tl.sum(tl.where(is_above, tl.exp2((logit - best) * inverse_temperature), 0.0))
    return count, mass


@triton.jit
def sample_kernel(
    logits_ptr,  # fp32 [num_rows, vocab_size]
    temperatures_ptr,  # fp32 [num_rows]; 0: greedy
    top_k_ptr,  # int32 [num_rows]; vocab_size: off
    top_p_ptr,  # fp32 [num_rows]; 1: off
    min_p_ptr,  # fp32 [num_rows]; 0: off
    numbers_ptr,  # fp64 [num_rows] in [0, 1)
    tokens_ptr,  # int64 [num_rows]
    vocab_size,
    row_stride,
    LOG2_E: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    best = float("-inf")
    best_token = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        highest = tl.max(logit, 0)
        if highest > best:
            best = highest
            best_token = tl.min(tl.where(logit == highest, token, vocab_size), 0)
    temperature = tl.load(temperatures_ptr + row)
    if temperature == 0.0:
        tl.store(tokens_ptr + row, best_token.to(tl.int64))
        return
    scale = LOG2_E / temperature
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    lowest_key = -2147483648
    floor = lowest_key
    if top_k < vocab_size:
        floor = _bisect(row_ptr, top_k, 0.0, floor, best, scale, vocab_size, True, TILE)
    if top_p < 1.0:
        _, mass = _mass_above(row_ptr, lowest_key, floor, best, scale, vocab_size, TILE)
        floor = tl.maximum(floor, _bisect(row_ptr, 0, top_p * mass, floor, best, scale, vocab_size, False, TILE))
    if min_p > 0.0:
        floor = tl.maximum(floor, _ordered(best + tl.log2(min_p) / scale))
    _draw(row_ptr, tokens_ptr + row, tl.load(numbers_ptr + row), floor, best, best_token, scale, vocab_size, TILE)


@triton.jit
def _bisect(row_ptr, limit, mass_limit, floor, best, scale, vocab_size, IS_COUNT: tl.constexpr, TILE: tl.constexpr):
    """The smallest key above which fewer than `limit` tokens lie, or less than `mass_limit` of what `floor` keeps."""
    low = tl.full((), -2147483648, tl.int64)
    high = _ordered(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        count, mass = _mass_above(row_ptr, middle.to(tl.int32), floor, best, scale, vocab_size, TILE)
        is_few = count < limit if IS_COUNT else mass < mass_limit
        high = tl.where(is_few, middle, high)
        low = tl.where(is_few, low, middle + 1)
    return high.to(tl.int32)


@triton.jit
def _draw(row_ptr, token_ptr, number, floor, best, best_token, scale, vocab_size, TILE: tl.constexpr):
    """The token on which `number` of the kept mass falls, in the order of ids; sums in float64."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        weight = tl.where(_ordered(logit) >= floor, tl.exp2((logit - best) * scale), 0.0)
        total += tl.sum(weight.to(tl.float64), 0)
    target = number * total
    before = tl.full((), 0.0, tl.float64)
    chosen = tl.full((), -1, tl.int32)
    # Where rounding lets the target reach the total, the last token of positive weight is taken.
    last = best_token
    for start in range(0, vocab_size, TILE):
        if chosen < 0:
            token = start + tl.arange(0, TILE)
            logit = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
            weight = tl.where(_ordered(logit) >= floor, tl.exp2((logit - best) * scale), 0.0).to(tl.float64)
            cumulative = before + tl.cumsum(weight, 0)
            is_passed = (cumulative > target) & (weight > 0.0)
            first = tl.min(tl.where(is_passed, token, vocab_size), 0)
            last = tl.maximum(last, tl.max(tl.where(weight > 0.0, token, 0), 0))
            chosen = tl.where(first < vocab_size, first, chosen)
            before += tl.sum(weight, 0)
    tl.store(token_ptr, tl.where(chosen < 0, last, chosen).to(tl.int64))


def sample_top_k_top_p(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """One token of each row. Tokens as likely as the last one kept are kept too.

    Args:
        logits: fp32 `[num_rows, vocab_size]`, rows any stride apart.
        temperatures: fp32 `[num_rows]`; 0: greedy.
        top_k: int32 `[num_rows]`; 0 or less, or at least the vocabulary: off.
        top_p: fp32 `[num_rows]`, of what top-k keeps; 1: off.
        min_p: fp32 `[num_rows]`, relative to the most likely token; 0: off.
        numbers: fp64 `[num_rows]` in [0, 1).

    Returns:
        int64 `[num_rows]`.
    """
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).to(torch.int32)
    tile = min(TILE_TOKENS, next_power_of_2(vocab_size))
    sample_kernel[(num_rows,)](
        logits,
        temperatures,
        kept,
        top_p,
        min_p,
        numbers,
        tokens,
        vocab_size,
        logits.stride(0),
        LOG2_E=LOG2_E,
        TILE=tile,
        num_warps=max(1, min(16, tile // 256)),
    )
    return tokens
