"""Gathering KV blocks for a copy to the host: time and share of the copy bandwidth, on a GPU."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Measure, main, random_tensor

from pdserve.kernels.gather_blocks import gather_blocks
from pdserve.kernels.reference import blocks as reference_blocks


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """Blocks of 2 MiB (a 32-layer model's)."""
    num_blocks, block_values, chosen = (9, 1021, 5) if is_tiny else (2048, 2**21 // dtype.itemsize, 512)
    if block_values * dtype.itemsize % 4:
        block_values += 1
    cache = random_tensor(num_blocks, block_values, device=device, dtype=dtype)
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))[:chosen].to(device)
    return [
        Measure(
            f"gather_blocks {chosen} x {block_values * dtype.itemsize} bytes",
            lambda: gather_blocks(cache, ids),
            lambda: reference_blocks.gather_blocks(cache, ids),
            2 * chosen * block_values * dtype.itemsize,
            tolerance=0.0,
        )
    ]


if __name__ == "__main__":
    main(measures)
