"""The digest of KV blocks: time and share of the copy bandwidth, on a GPU."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Measure, main, random_tensor

from pdserve.kernels.block_digest import block_digest
from pdserve.kernels.reference import blocks as reference_blocks


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """A few blocks as they finish with a prompt chunk, and many."""
    num_blocks, num_values = (9, 1021) if is_tiny else (1024, 2**21 // 4)
    cache = random_tensor(num_blocks, num_values, device=device, dtype=torch.float32)
    found = []
    for chosen in (1, 5) if is_tiny else (32, 512):
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(chosen))[:chosen].to(device)
        found.append(
            Measure(
                f"block_digest {chosen} x {4 * num_values} bytes",
                lambda i=ids: block_digest(cache, i),
                lambda i=ids: reference_blocks.block_digest(cache, i),
                chosen * 4 * num_values,
                tolerance=0.0,
            )
        )
    return found


if __name__ == "__main__":
    main(measures)
