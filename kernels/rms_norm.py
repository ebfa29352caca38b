"""RMSNorm, with the residual addition before it in the same pass. Bound by memory; one read and one write a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import cdiv, check_float, next_power_of_2

_TILE_VALUES = 4096
"""Values that one program holds at once, unless one row has more."""
MAX_ROW = 32_768
"""The most values that a row may have: it is held in registers."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    hidden_ptr,  # [num_rows, size], rows hidden_stride apart
    weight_ptr,  # [size]
    residual_ptr,  # [num_rows, size] or the same as hidden_ptr
    normed_ptr,  # [num_rows, size]
    sum_ptr,  # [num_rows, size] or the same as normed_ptr
    num_rows,
    eps,
    hidden_stride,
    SIZE: tl.constexpr,
    SIZE_P2: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program: ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE_P2)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)[:, None]
    place = row * SIZE + column[None, :]
    stored = tl.load(hidden_ptr + row * hidden_stride + column[None, :], mask=mask, other=0.0)
    value = stored.to(tl.float32)
    if HAS_RESIDUAL:
        total = (value + tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)).to(stored.dtype)
        tl.store(sum_ptr + place, total, mask=mask)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    # Rounded before the weight is applied, as the models do.
    normed = (value * scale[:, None]).to(stored.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(normed_ptr + place, normed.to(stored.dtype), mask=mask)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Root mean square norm of each row of `hidden + residual`.

    Args:
        hidden: `[num_rows, size]`, rows any stride apart.
        weight: `[size]`.
        eps: added to the mean square.
        residual: `[num_rows, size]`, contiguous; None: nothing is added.

    Returns:
        The normed rows, contiguous, and `hidden + residual` (`hidden` itself without a residual).
    """
    check_float(hidden=hidden, weight=weight)
    num_rows, size = hidden.shape
    assert size <= MAX_ROW, f"rows of {size} values, at most {MAX_ROW}"
    assert weight.shape == (size,), (weight.shape, size)
    normed = torch.empty(num_rows, size, dtype=hidden.dtype, device=hidden.device)
    if residual is not None:
        assert residual.shape == hidden.shape, (residual.shape, hidden.shape)
        assert residual.is_contiguous(), residual.stride()
    total = hidden if residual is None else torch.empty_like(normed)
    if num_rows == 0:
        return normed, total
    rows, num_warps = tile_shape(size)
    rms_norm_kernel[(cdiv(num_rows, rows),)](
        hidden,
        weight,
        hidden if residual is None else residual,
        normed,
        normed if residual is None else total,
        num_rows,
        eps,
        hidden.stride(0),
        SIZE=size,
        SIZE_P2=next_power_of_2(size),
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps,
    )
    return normed, total


def tile_shape(size: int) -> tuple[int, int]:
    """Rows of one program, and its warps: 16 values a thread up to rows of 16384."""
    padded = next_power_of_2(size)
    rows = max(1, _TILE_VALUES // padded)
    return rows, min(32, max(4, rows * padded // 512))
