"""Every field of a model folder is used, refused or harmless: the tables against transformers' own classes and code."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import SHAPE, build, changed, served, truth
from transformers import AutoConfig, GenerationConfig

from pdserve.errors import ModelError
from pdserve.models.fields.check import check_config, check_generation
from pdserve.models.fields.config_fields import COMMON, FAMILIES, FAMILY, FOREIGN, NORMS_QUERIES, field_of
from pdserve.models.fields.generation_fields import GENERATION_CONFIG
from pdserve.models.fields.treatment import Treatment

FILE = Path("m") / "config.json"


# --- the tables are complete


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attribute_of_a_familys_configuration_is_in_the_table(family: str) -> None:
    names = AutoConfig.for_model(family).to_dict()
    assert [name for name in names if field_of(family, name) is None] == []
    assert check_config(names, FILE) == []  # and the class's own defaults are accepted


def read_by_code(family: str) -> Iterator[str]:
    """Attributes of a configuration that the modeling code of transformers reads."""
    name = family.removesuffix("_text")
    tree = ast.parse(inspect.getsource(importlib.import_module(f"transformers.models.{name}.modeling_{name}")))
    others = ("Vision", "Sequence", "Token", "Question", "MultiModal", "ForConditional")
    for part in tree.body:
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not any(word in part.name for word in others):
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config"):
                    yield node.attr


MEMORY_ONLY = {"attention_dropout", "resid_pdrop", "_attn_implementation", "pad_token_id", "get_text_config"}
MEMORY_ONLY |= {"vision_config", "image_token_id"}
NOT_APPLIED = {("gemma2", "use_bidirectional_attention"), ("gemma3_text", "use_bidirectional_attention")}
NOT_APPLIED |= {("gemma3_text", "attn_logit_softcapping")}
"""Read by the code, and refused here: a decoder that sees what follows; a limit that never reaches the attention."""


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_the_modeling_code_reads_is_used(family: str) -> None:
    for name in set(read_by_code(family)) - MEMORY_ONLY:
        field = field_of(family, name)
        assert field is not None, name
        expected = Treatment.REFUSED if (family, name) in NOT_APPLIED else Treatment.USED
        assert field.treatment is expected, name


def test_every_field_of_a_generation_configuration_is_in_the_table() -> None:
    assert set(GenerationConfig().to_dict()) - GENERATION_CONFIG.keys() == set()
    assert check_generation(GenerationConfig().to_dict(), FILE) == []


# --- what the tables say is true

USED: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 40,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "rope_local_base_freq": 40.0,
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "partial_rotary_factor": 0.5,
    "no_rope_layers": [0, 1, 0, 1],
    "no_rope_layer_interval": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.5,
    "logits_scaling": 4.0,
}
"""For each field of a family a value that changes its logits."""
WITH: dict[str, dict[str, Any]] = {
    "use_sliding_window": {"sliding_window": 5, "layer_types": None, "max_window_layers": 2},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 5, "layer_types": None},
    "layer_types": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None},
    "sliding_window_pattern": {"layer_types": None, "sliding_window": 5, "_sliding_window_pattern": None},
    "_sliding_window_pattern": {"layer_types": None, "sliding_window": 5},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "rope_local_base_freq": {"rope_parameters": None, "rope_theta": 10000.0},
    "partial_rotary_factor": {"rope_parameters": None, "rope_theta": 10000.0},
}
"""What else a folder must say for a field to have a meaning; what its family does not read is left out."""
SILENT = {("gemma3_text", "_sliding_window_pattern")}
"""Written by transformers, which reads the name without the line before it."""


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in FAMILY[family] if (family, name) not in SILENT],
)
def test_a_field_that_is_used_changes_the_logits_as_in_transformers_or_the_tensors_do_not_fit(
    tmp_path: Path, family: str, name: str
) -> None:
    around = {key: value for key, value in WITH.get(name, {}).items() if field_of(family, key) is not None}
    around = {key: value for key, value in around.items() if key not in FOREIGN or key in FAMILY[family]}
    folder = changed(build(tmp_path, family), **around)
    before = truth(folder)
    changed(folder, **{name: USED[name]})
    if name.endswith("_bias"):
        with pytest.raises(ModelError, match=r"lacks the tensor .*bias"):
            served(folder)
        return
    expected = truth(folder)
    assert not torch.allclose(expected, before, atol=1e-3), "the value changes nothing: the test shows nothing"
    assert torch.allclose(served(folder), expected, atol=2e-4)


HARMLESS: dict[str, Any] = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "is_decoder": True, "bos_token_id": 5}
HARMLESS |= {
    "cache_implementation": "hybrid",
    "initializer_range": 0.5,
    "auto_map": {"AutoModelForCausalLM": "modeling_x.Y"},
    "prefix": "x",
    "processor_class": "x",
}
UNLIKELY = {
    "return_dict",
    "use_return_dict",
    "_attn_implementation",
    "attn_implementation",
    "_experts_implementation",
    "architectures",
}
MEANT = {"num_labels", "id2label", "label2id", "problem_type", "transformers_version", "vision_config", "audio_config"}
"""Their values have forms of their own; transformers checks them before it ignores them."""


def other_than(value: Any) -> Any:
    """Another value of the same type."""
    return (not value) if isinstance(value, bool) else 0.5 if isinstance(value, float) else 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "granite", "olmo2"])
def test_harmless_fields_change_no_logits(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path, family)
    before = truth(folder)
    harmless = {name: field for name, field in COMMON.items() if field.treatment is Treatment.HARMLESS}
    usual = AutoConfig.for_model(family).to_dict()
    values = {name: HARMLESS.get(name, other_than(usual.get(name, 1))) for name in harmless}
    changed(folder, **{name: value for name, value in values.items() if name not in UNLIKELY | MEANT})
    assert torch.allclose(truth(folder), before, atol=1e-6)
    changed(folder, return_dict=False)
    assert torch.allclose(served(folder), before, atol=2e-4)


TOLD_BY_NEIGHBOURS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
TOLD_BY_NEIGHBOURS |= {"sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers"}
"""What they ask for depends on other fields: see the cases below."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_only_others_read_is_refused_by_name(family: str) -> None:
    names = [name for name, field in FOREIGN.items() if field.treatment is Treatment.REFUSED]
    foreign = set(names) - FAMILY[family].keys() - TOLD_BY_NEIGHBOURS
    assert len(foreign) > 70
    for name in foreign:
        for value in (7.5, [3, 7], {"a": 1}):
            if name.endswith(("qk_norm", "qk_layernorm", "key_norm")) and family in NORMS_QUERIES:
                continue  # whatever is no is refused, see below
            with pytest.raises(
                ModelError, match=rf"config\.json: {name} is .*, which models of type '{family}' cannot"
            ):
                check_config({**SHAPE, "model_type": family, name: value}, FILE)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"sliding_window": 4096, "use_sliding_window": False}),
        ("llama", {"sliding_window": 256}),  # as long as the context
        ("llama", {"attention_multiplier": 0.25, "query_pre_attn_scalar": 16, "use_qk_norm": False}),
        ("qwen3", {"qk_norm": True, "use_mrope": False, "no_rope_layers": [1, 1, 1, 1]}),
        ("mistral", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 64, "use_sliding_window": True}),
        ("phi3", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
        ("qwen2", {"attention_bias": True, "rope_ratio": 1, "clip_qkv": None, "num_experts": 0}),
        ("olmo2", {"embedding_multiplier": 1.0, "logits_scaling": 1, "parallel_residual": False}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "query_pre_attn_scalar": 256}),
    ],
)
def test_what_asks_for_nothing_is_accepted(family: str, fields: dict[str, Any]) -> None:
    assert check_config({**SHAPE, "model_type": family, **fields}, FILE) == []


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "attention_multiplier", 0.3),
        ("llama", "sliding_window", 64),
        ("llama", "layer_types", ["full_attention", "sliding_attention"]),
        ("smollm3", "max_window_layers", 2),
        ("mistral", "sliding_window_pattern", 4),
        ("llama", "use_mrope", True),
        ("llama", "alibi", True),
        ("mistral", "use_sliding_window", False),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3", "use_qk_norm", False),
        ("llama", "use_qk_norm", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma2", "use_bidirectional_attention", True),
        ("qwen2", "no_rope_layers", [1, 0, 1, 1]),
        ("granite", "logit_scale", 0.25),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("gpt_neox", "quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("llama", "is_encoder_decoder", True),
    ],
)
def test_what_would_change_results_is_refused(family: str, name: str, value: Any) -> None:
    around: dict[str, Any] = {"sliding_window": 64} if family == "mistral" or "window" in name else {}
    around |= {"use_sliding_window": True} if name == "max_window_layers" else {}
    config = {**around, **SHAPE, "model_type": family, name: value}
    with pytest.raises(ModelError, match=f"config.json: {name} is "):
        check_config(config, FILE)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_scaling": {"rope_type": "wat", "factor": 2}}, "rope_type is 'wat'; expected default, linear"),
        ({"rope_scaling": {"factor": 4.0}}, "without a rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": [2]}, "expected an object"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "whatever": 1}}, "whatever is 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta is None"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "say different things",
        ),
    ],
)
def test_rotary_positions_that_mean_nothing_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        check_config({**SHAPE, "model_type": "llama", **fields}, FILE)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rotary_positions_of_every_type_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    table = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 32}
    table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    for family in ("llama", "qwen3", "olmo2"):
        folder = build(tmp_path / family, family)
        before = truth(folder)
        changed(folder, rope_parameters=None, rope_theta=500.0, rope_scaling=table)
        expected = truth(folder)
        assert not torch.allclose(expected, before, atol=1e-3)
        if kind == "dynamic":
            continue  # its own length is served without a change, see test_context_length.py
        assert torch.allclose(served(folder), expected, atol=2e-4)
