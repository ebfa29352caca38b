"""RMSNorm with the residual addition: time and share of the copy bandwidth, on a GPU."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Measure, main, num_bytes, random_tensor

from pdserve.kernels.reference import layers as reference_layers
from pdserve.kernels.rms_norm import rms_norm


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """Rows of a decode step and of a prompt chunk."""
    found = []
    for rows, size in [(3, 100)] if is_tiny else [(64, 4096), (8192, 4096)]:
        hidden = random_tensor(rows, size, device=device, dtype=dtype)
        residual = random_tensor(rows, size, device=device, dtype=dtype)
        weight = random_tensor(size, device=device, dtype=dtype)
        arguments = (hidden, weight, 1e-6, residual)
        found.append(
            Measure(
                f"rms_norm {rows} x {size} with residual",
                lambda a=arguments: rms_norm(*a),
                lambda a=arguments: reference_layers.rms_norm(*a),
                2 * num_bytes(hidden, residual),
            )
        )
    return found


if __name__ == "__main__":
    main(measures)
