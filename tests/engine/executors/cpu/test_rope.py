"""Rope tables against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdserve.engine.executors.cpu import rope

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
_CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **_LLAMA3},
    "yarn": _YARN,
    "yarn with betas": {**_YARN, "beta_fast": 20, "beta_slow": 2, "attention_factor": 1.2},
    "yarn with scales": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn not truncated": {**_YARN, "truncate": False},
    "yarn where the ramp has no width": {**_YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    "dynamic within the trained context": {"rope_type": "dynamic", "factor": 4.0},
}


def _config(parameters: dict, head_dim: int = 64) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": head_dim * 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_theta": 50_000.0, **parameters},
    }


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("case", _CASES)
def test_frequencies_equal_those_of_transformers(case, head_dim):
    config = _config(_CASES[case], head_dim)
    theirs = LlamaConfig(**config)
    kind = _CASES[case]["rope_type"]
    if kind == "default":
        expected, factor = LlamaRotaryEmbedding(theirs).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, device=torch.device("cpu"))
    frequencies, scaling = rope.inverse_frequencies(config, head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scaling == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("case", ["default", "yarn"])
def test_tables_equal_the_rotary_module(case):
    config = _config(_CASES[case])
    module = LlamaRotaryEmbedding(LlamaConfig(**config))
    cosines, sines = module(torch.zeros(1), torch.arange(2048)[None])
    ours = rope.rope_tables(config, 64, 2048)
    torch.testing.assert_close(ours[0], cosines[0, :, :32], rtol=0, atol=2e-4)  # angles of thousands of radians in fp32
    torch.testing.assert_close(ours[1], sines[0, :, :32], rtol=0, atol=2e-4)


def test_the_older_form_of_the_configuration_means_the_same():
    new = _config(_CASES["llama3"])
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rope_theta": 50_000.0, "rope_scaling": {"type": "llama3", **_LLAMA3}}
    assert torch.equal(rope.inverse_frequencies(old, 64)[0], rope.inverse_frequencies(new, 64)[0])


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (_config({"rope_type": "longrope"}), "longrope"),
        (_config({"rope_type": "default", "partial_rotary_factor": 0.5}), "partial"),
        ({**_config({}), "partial_rotary_factor": 0.25}, "partial"),
    ],
)
def test_what_a_cached_key_cannot_follow_is_refused_by_name(config, part):
    assert part in rope.why_unsupported(config)


@pytest.mark.parametrize("case", _CASES)
def test_the_served_types_are_not_refused(case):
    assert rope.why_unsupported(_config(_CASES[case])) is None
