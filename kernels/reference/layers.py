"""Eager torch twins of the kernels between the matrix products: same names, same signatures, no cleverness."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.reference import packed_attention as reference


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Root mean square norm of each row of `hidden + residual`; the normed rows and that sum.

    Args:
        hidden: `[num_rows, size]`.
        weight: `[size]`.
        eps: added to the mean square.
        residual: `[num_rows, size]`; None: nothing is added.
    """
    total = hidden if residual is None else hidden + residual
    exact = total.float()
    normed = exact * (exact.square().mean(1, keepdim=True) + eps).rsqrt()
    return normed.to(hidden.dtype) * weight, total


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`; `[num_rows, 2 * size]` (gate, then up) in, `[num_rows, size]` out."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values `[num_tokens, num_kv_heads, head_dim]` into their slots; none for a slot below 0."""
    is_written = slot_mapping >= 0
    reference.write_kv(key[is_written], value[is_written], kv_layer, slot_mapping[is_written])


def rope_and_write_kv(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Rotate queries and keys, write keys and values into their slots; the rotated queries.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, before RoPE.
        key: `[num_tokens, num_kv_heads, head_dim]`, before RoPE.
        value: as key.
        cos: `[num_tokens, head_dim]`; the second half repeats the first.
        sin: the same.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        slot_mapping: int64 `[num_tokens]`; a token whose slot is below 0 is not written.
    """
    write_kv(_rotate(key, cos, sin), value, kv_layer, slot_mapping)
    return _rotate(query, cos, sin)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.float().chunk(2, dim=2)
    cos, sin = (table.float().chunk(2, dim=1)[0][:, None] for table in (cos, sin))
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=2).to(states.dtype)
