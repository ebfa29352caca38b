"""RoPE and KV write: time and share of the copy bandwidth, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.bench import Measure, main, num_bytes, random_tensor
from torch import Tensor

from pdserve.kernels.reference import layers as reference_layers
from pdserve.kernels.write_kv import rope_and_write_kv

_BLOCK_SIZE = 16


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """Tokens of a decode step and of a prompt chunk."""
    found = []
    for tokens, heads, kv_heads, head_dim in [(5, 4, 2, 20)] if is_tiny else [(64, 32, 8, 128), (8192, 32, 8, 128)]:
        merged = random_tensor(tokens, heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)
        query, key, value = torch.split(merged, [heads, kv_heads, kv_heads], dim=1)
        angles = random_tensor(tokens, head_dim // 2, device=device, dtype=torch.float32).repeat(1, 2)
        num_blocks = -(-tokens // _BLOCK_SIZE) + 1
        cache = torch.zeros(num_blocks, 2, 2, _BLOCK_SIZE, kv_heads, head_dim, dtype=dtype, device=device)
        slots = torch.randperm(num_blocks * _BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
        arguments = (query, key, value, angles.cos().to(dtype), angles.sin().to(dtype))
        found.append(
            Measure(
                f"write_kv {tokens} tokens with RoPE",
                _call(rope_and_write_kv, arguments, cache, slots),
                _call(reference_layers.rope_and_write_kv, arguments, torch.zeros_like(cache), slots),
                2 * num_bytes(merged),
            )
        )
    return found


def _call(
    function: Callable[..., Tensor], arguments: tuple[Any, ...], cache: Tensor, slots: Tensor
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Rotated queries, and the layer as it is afterwards."""
    return lambda: (function(*arguments, cache[:, 1], slots), cache[:, 1])


if __name__ == "__main__":
    main(measures)
