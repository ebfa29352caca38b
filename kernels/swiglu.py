"""SwiGLU on the output of one merged projection: silu(gate) * up. Bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import cdiv, check_float, next_power_of_2

TILE_VALUES = 2048
"""Number of results that one program computes."""


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(
    gate_up_ptr,  # [num_rows, 2 * size], rows input_stride apart: gate, then up
    output_ptr,  # [num_rows, size]
    num_rows,
    input_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: ROWS x COLUMNS results."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)[:, None]
    start = gate_up_ptr + row * input_stride + column[None, :]
    stored = tl.load(start, mask=mask, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(start + SIZE, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the product, as the models do.
    activated = (gate * tl.sigmoid(gate)).to(stored.dtype).to(tl.float32)
    tl.store(output_ptr + row * SIZE + column[None, :], (activated * up).to(stored.dtype), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of each row.

    Args:
        gate_up: `[num_rows, 2 * size]`: gate, then up; rows any stride apart.

    Returns:
        `[num_rows, size]`, contiguous.
    """
    check_float(gate_up=gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * size, f"{gate_up.shape[1]} columns are not two halves"
    output = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return output
    rows, columns = tile_shape(size)
    grid = (cdiv(num_rows, rows), cdiv(size, columns))
    swiglu_kernel[grid](gate_up, output, num_rows, gate_up.stride(0), SIZE=size, ROWS=rows, COLUMNS=columns)
    return output


def tile_shape(size: int) -> tuple[int, int]:
    """Rows and columns of results that one program computes."""
    columns = min(TILE_VALUES, next_power_of_2(size))
    return TILE_VALUES // columns, columns
