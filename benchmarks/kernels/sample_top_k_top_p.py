"""Sampling without a sort: time of a batch, on a GPU."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Measure, main, num_bytes, random_tensor

from pdserve.kernels.reference import sampling as reference_sampling
from pdserve.kernels.sample_top_k_top_p import sample_top_k_top_p

_TOLERANCE = 0.05
"""Share of rows: a number that falls on the border of two tokens goes to either, as float32 and float64 round."""
_FILTERS = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top-k 50, top-p 0.9": (0.8, 50, 0.9)}


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """One decode step of 64 sequences over a large vocabulary. Logits are float32 whatever the model."""
    rows, vocab_size = (2, 301) if is_tiny else (64, 128256)
    logits = 3 * random_tensor(rows, vocab_size, device=device, dtype=torch.float32)
    numbers = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for name, (temperature, top_k, top_p) in _FILTERS.items():
        arguments = (
            logits,
            torch.full((rows,), temperature, device=device),
            torch.full((rows,), top_k, dtype=torch.int32, device=device),
            torch.full((rows,), top_p, device=device),
            torch.zeros(rows, device=device),
            numbers,
        )
        found.append(
            Measure(
                f"sample_top_k_top_p {rows} x {vocab_size} {name}",
                lambda a=arguments: sample_top_k_top_p(*a),
                lambda a=arguments: reference_sampling.sample_top_k_top_p(*a),
                num_bytes(logits),
                tolerance=_TOLERANCE,
            )
        )
    return found


if __name__ == "__main__":
    main(measures)
