from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from pdserve.kernels import rms_norm
from pdserve.kernels.reference import layers as reference_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 100), (33, 64), (3, 576), (2, 5000), (0, 64)])
def test_it_is_its_twin(interpreted, num_rows, size, has_residual, dtype):
    torch.manual_seed(size)
    wide = torch.randn(num_rows, size + 3, dtype=dtype)
    hidden, weight = wide[:, :size], torch.randn(size, dtype=dtype)
    residual = torch.randn(num_rows, size, dtype=dtype) if has_residual else None
    normed, total = interpreted(hidden, weight, 1e-6, residual)
    expected, expected_total = reference_layers.rms_norm(hidden, weight, 1e-6, residual)
    assert_close(normed, expected)
    assert torch.equal(total, expected_total)


def test_the_twin_is_torchs_own():
    hidden, weight = torch.randn(5, 77), torch.randn(77)
    expected = torch.nn.functional.rms_norm(hidden, (77,), weight, 1e-5)
    torch.testing.assert_close(reference_layers.rms_norm(hidden, weight, 1e-5)[0], expected)


def test_bfloat16_is_refused_with_a_sentence(interpreted):
    hidden, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="float32 or float16 under TRITON_INTERPRET, because the interpreter"):
        interpreted(hidden, weight, 1e-6, None)


@pytest.mark.parametrize("size", [1, 100, 128, 4096, 5000, 16384, 32768])
def test_a_tile_has_at_most_32_values_a_thread(size):
    rows, num_warps = rms_norm.tile_shape(size)
    padded = 1 << (size - 1).bit_length()
    assert rows * padded <= num_warps * 32 * 32
    assert num_warps <= 32
