"""SwiGLU: time and share of the copy bandwidth, on a GPU."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Measure, main, num_bytes, random_tensor

from pdserve.kernels.reference import layers as reference_layers
from pdserve.kernels.swiglu import swiglu


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """Rows of a decode step and of a prompt chunk."""
    found = []
    for rows, size in [(3, 50)] if is_tiny else [(64, 14336), (8192, 14336)]:
        gate_up = random_tensor(rows, 2 * size, device=device, dtype=dtype)
        found.append(
            Measure(
                f"swiglu {rows} x {size}",
                lambda g=gate_up: swiglu(g),
                lambda g=gate_up: reference_layers.swiglu(g),
                num_bytes(gate_up) * 3 // 2,
            )
        )
    return found


if __name__ == "__main__":
    main(measures)
