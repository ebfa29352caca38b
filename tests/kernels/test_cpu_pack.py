"""Packing against a plain torch rearrangement."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.cpu import ops as cpu_ops

pytestmark = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))

_TYPES = {torch.float32: cpu_ops.F32, torch.bfloat16: cpu_ops.BF16, torch.int8: cpu_ops.I8, torch.float16: cpu_ops.F16}


def _pack(weight: torch.Tensor, dtype: torch.dtype, num_threads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    rows, k = weight.shape
    columns = -(-rows // cpu_ops.PANEL) * cpu_ops.PANEL
    panels, scale = torch.zeros(columns // cpu_ops.PANEL, k, cpu_ops.PANEL, dtype=dtype), torch.zeros(columns)
    cpu_ops.pack(
        *(weight.data_ptr(), _TYPES[weight.dtype], rows, k),
        panels=panels.data_ptr(),
        weight_type=_TYPES[dtype],
        k_packed=k,
        num_threads=num_threads,
        scale=scale.data_ptr() if dtype == torch.int8 else 0,
    )
    return panels.transpose(1, 2).reshape(columns, k), scale


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 31, 32, 100])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_matrix_unpacks_to_itself_with_zero_columns_behind(source, rows, num_threads):
    weight = torch.randn(rows, 37).to(source)
    unpacked, _ = _pack(weight, torch.float32, num_threads)
    assert torch.equal(unpacked[:rows], weight.float())
    assert not unpacked[rows:].any()


def test_fp16_subnormals_and_infinities_survive():
    weight = torch.tensor([[6e-8, -6e-8, 65504.0, float("inf"), -float("inf"), 0.0]]).half()
    assert torch.equal(_pack(weight, torch.float32)[0][:1], weight.float())


def test_fp32_is_rounded_to_the_nearest_bf16():
    weight = torch.randn(64, 50)
    assert torch.equal(_pack(weight, torch.bfloat16)[0], weight.bfloat16())


@pytest.mark.parametrize("k", [50, 37, 1])
def test_pairs_keep_two_neighbouring_k_of_a_column_side_by_side(k):
    weight = torch.randn(70, k)
    panels = torch.zeros(3, -(-k // 2), cpu_ops.PANEL, 2, dtype=torch.bfloat16)
    cpu_ops.pack(
        *(weight.data_ptr(), cpu_ops.F32, 70, k),
        panels=panels.data_ptr(),
        weight_type=cpu_ops.BF16_PAIRS,
        k_packed=k,
        num_threads=2,
    )
    unpacked = panels.permute(0, 2, 1, 3).reshape(96, -1)
    assert torch.equal(unpacked[:70, :k], weight.bfloat16())
    assert not unpacked[:, k:].any()
    assert not unpacked[70:].any()


def test_int8_has_one_symmetric_scale_per_row():
    weight = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    weight[3] = 0
    unpacked, scale = _pack(weight, torch.int8)
    highest = weight.abs().amax(1)
    torch.testing.assert_close(scale[:40], highest / 127)
    assert unpacked[:40].float().abs().amax(1)[highest > 0].eq(127).all()
    error = (unpacked[:40].float() * scale[:40, None] - weight).abs()
    assert (error <= scale[:40, None] * 0.5001).all()


@pytest.mark.parametrize("k", [64, 37])
def test_int8_in_pairs_has_the_same_values_in_another_order(k):
    weight = torch.randn(70, k)
    panels, scale = torch.zeros(3, -(-k // 2), 2, 2, 16, dtype=torch.int8), torch.zeros(96)
    cpu_ops.pack(
        *(weight.data_ptr(), cpu_ops.F32, 70, k),
        panels=panels.data_ptr(),
        weight_type=cpu_ops.I8_PAIRS,
        k_packed=k,
        num_threads=2,
        scale=scale.data_ptr(),
    )
    unpacked = panels.permute(0, 2, 4, 1, 3).reshape(96, -1)
    expected, expected_scale = _pack(weight, torch.int8)
    assert torch.equal(unpacked[:, :k], expected)
    assert torch.equal(scale, expected_scale)
    assert not unpacked[:, k:].any()


def test_groups_interleave_two_matrices_in_one_panel():
    gate, up = torch.randn(40, 8), torch.randn(40, 8)
    panels = torch.zeros(3, 8, cpu_ops.PANEL)
    for offset, weight in ((0, gate), (16, up)):
        cpu_ops.pack(
            *(weight.data_ptr(), cpu_ops.F32, 40, 8),
            panels=panels.data_ptr(),
            weight_type=cpu_ops.F32,
            k_packed=8,
            num_threads=2,
            group=16,
            stride=32,
            offset=offset,
        )
    columns = panels.transpose(1, 2).reshape(96, 8)
    assert torch.equal(columns[:16], gate[:16])
    assert torch.equal(columns[16:32], up[:16])
    assert torch.equal(columns[64:72], gate[32:])
    assert torch.equal(columns[80:88], up[32:])
    assert not columns[72:80].any()
