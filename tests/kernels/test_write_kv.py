from __future__ import annotations

import pytest
import torch
from tolerances import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pdserve.kernels.reference import layers as reference_layers

SHAPES = [(1, 4, 2, 16), (5, 4, 4, 64), (137, 6, 1, 20), (17, 2, 2, 128), (0, 2, 1, 8)]
IDS = ["one-token", "mha", "137-tokens-odd-head", "17-tokens", "empty"]


def _inputs(num_tokens, heads, kv_heads, head_dim, dtype, kv_dtype):
    torch.manual_seed(num_tokens)
    merged = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.randn(num_tokens, head_dim // 2).repeat(1, 2)
    cache = torch.zeros(50, 3, 2, 4, kv_heads, head_dim, dtype=kv_dtype)
    slots = torch.randperm(200)[:num_tokens]
    slots[1::3] = -1
    return query, key, value, angles.cos().to(dtype), angles.sin().to(dtype), cache, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_rotated_queries_keys_and_values_are_those_of_the_twin(interpreted, shape, dtype):
    query, key, value, cos, sin, cache, slots = _inputs(*shape, dtype, dtype)
    expected_cache = cache.clone()
    rotated = interpreted(query, key, value, cos, sin, cache[:, 1], slots, function="rope_and_write_kv")
    expected = reference_layers.rope_and_write_kv(query, key, value, cos, sin, expected_cache[:, 1], slots)
    assert_close(rotated, expected)
    assert_close(cache, expected_cache)
    assert not cache[:, (0, 2)].any(), "another layer was written"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_without_rope_keys_and_values_are_written_as_they_are(interpreted, shape, kv_dtype):
    _, key, value, _, _, cache, slots = _inputs(*shape, torch.float32, kv_dtype)
    expected_cache = cache.clone()
    interpreted(key, value, cache[:, 1], slots)
    reference_layers.write_kv(key, value, expected_cache[:, 1], slots)
    assert torch.equal(cache, expected_cache)


def test_the_twin_rotates_as_the_models_do():
    query, key, value, cos, sin, cache, slots = _inputs(9, 4, 2, 16, torch.float32, torch.float32)
    expected, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    rotated = reference_layers.rope_and_write_kv(query, key, value, cos, sin, cache[:, 1], slots)
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1))
