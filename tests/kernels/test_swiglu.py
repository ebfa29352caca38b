from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from pdserve.kernels.reference import layers as reference_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 100), (5, 1536), (2, 2049), (0, 8)])
def test_it_is_its_twin(interpreted, num_rows, size, dtype):
    torch.manual_seed(size)
    gate_up = 3 * torch.randn(num_rows, 2 * size, dtype=dtype)
    assert_close(interpreted(gate_up), reference_layers.swiglu(gate_up))


def test_large_gates_neither_overflow_nor_vanish(interpreted):
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]])
    assert interpreted(gate_up).tolist() == [[0.0, 2e4, 0.0]]
