"""How far a kernel may be from its twin, relative to the largest value.

float32: other orders of summation and powers of two instead of e. float16: half a unit in the last place is 5e-4 of
a value, and rounded intermediate results are products of a few of them.
"""

from __future__ import annotations

import torch

RELATIVE = {torch.float32: 1e-5, torch.float16: 1e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return
    assert not actual.isnan().any()
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6)
    assert error <= RELATIVE[actual.dtype], f"relative error {error:.2e}"
