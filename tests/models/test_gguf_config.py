"""What a GGUF file says of its model counts: a converted folder answers as the model that the file was made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import ARCHITECTURES, make_model, write_gguf
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pdserve.errors import ModelError
from pdserve.models.fields.gguf_fields import GENERAL, OF_ARCHITECTURE, gguf_field
from pdserve.models.gguf import convert
from pdserve.models.gguf_config import llama3_factors

PROMPT = [(11 * i + 5) % 250 for i in range(90)]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.tensor([PROMPT])).logits[0]


def converted(
    folder: Path, model: Any, keys: dict[str, Any] | None = None, tensors: Any = None, **options: Any
) -> Path:
    file = write_gguf(folder / "model.gguf", model, keys, tensors, **options)
    return convert(file, folder / "converted", lambda line: None)


def answers(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())


def all_keys(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        if isinstance(value, str) and not name.startswith("_"):
            yield value
        elif isinstance(value, type):
            yield from all_keys(value)


def test_every_key_of_the_format_is_in_the_table() -> None:
    keys = list(all_keys(gguf.constants.Keys))
    assert len(keys) > 200
    own = [key.removeprefix("{arch}.") for key in keys if key.startswith("{arch}.")]
    assert [key for key in own if gguf_field(OF_ARCHITECTURE, key) is None] == []
    assert [key for key in keys if not key.startswith("{arch}.") and gguf_field(GENERAL, key) is None] == []


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_plain_file_answers_as_its_model(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    folder = converted(tmp_path, model)
    assert torch.allclose(answers(folder), logits(model), atol=1e-4)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
SHORT, LONG = [1.0 + i / 7 for i in range(8)], [2.0 + i for i in range(8)]


@pytest.mark.parametrize(
    ("family", "fields", "keys", "tensors"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            {"rope.scale_linear": 2.0},
            {},
        ),
        (
            "llama",
            {"rope_parameters": LLAMA3},
            {},
            {"rope_freqs.weight": llama3_factors(500000.0, 16, 8.0, 1.0, 4.0, 8192)},
        ),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "factor": 32.0}},
            {},
            {"rope_freqs.weight": llama3_factors(500000.0, 16, 32.0, 1.0, 4.0, 8192)},
        ),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 1e4,
                }
            },
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {},
        ),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 128,
                    "rope_theta": 1e6,
                    "beta_fast": 16.0,
                    "attention_factor": 0.5 * (1 + 0.1 * math.log(2)),
                }
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.attn_factor": 0.5,
            },
            {},
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {},
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                }
            },
            {"rope.freq_base_swa": 500.0},
            {},
        ),
        ("gemma3_text", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}, {}),
        (
            "gemma2",
            {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0, "sliding_window": 9},
            {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0},
            {},
        ),
        ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}, {}, {}),
        ("phi3", {"sliding_window": 13}, {"attention.sliding_window": 13}, {}),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope.dimension_count": 8},
            {},
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": SHORT,
                    "long_factor": LONG,
                    "attention_factor": 1.19,
                },
            },
            {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.19},
            {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
        ),
    ],
)
def test_whatever_a_file_says_is_carried_over(
    tmp_path: Path, family: str, fields: dict[str, Any], keys: dict[str, Any], tensors: dict[str, Any]
) -> None:
    model = make_model(family, **fields)
    folder = converted(tmp_path, model, keys, tensors)
    assert torch.allclose(answers(folder), logits(model), atol=1e-4)
    usual = {name: SAME.get(name) for name in fields}
    plain = make_model(family, **{name: value for name, value in usual.items() if value is not None})
    assert not torch.allclose(answers(folder)[:, :9], logits(plain)[:, :9], atol=1e-4), "the key changes nothing"


SAME = {"num_hidden_layers": 46}


@pytest.mark.parametrize(
    ("family", "keys", "tensors", "said"),
    [
        ("llama", {"attention.sliding_window": 64}, {}, "llama.attention.sliding_window = 64"),
        ("llama", {"attention.scale": 0.5}, {}, "llama.attention.scale = 0.5"),
        ("llama", {"embedding_scale": 12.0}, {}, "llama.embedding_scale = 12.0"),
        ("llama", {"logit_scale": 0.5}, {}, "llama.logit_scale = 0.5"),
        ("qwen2", {"final_logit_softcapping": 30.0}, {}, "qwen2.final_logit_softcapping = 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, {}, "gemma3.attn_logit_softcapping"),
        ("gemma3_text", {"attention.sliding_window_pattern": 3}, {}, "gemma3.attention.sliding_window_pattern = 3"),
        ("qwen3", {"rope.scaling.type": "wat", "rope.scaling.factor": 2.0}, {}, "qwen3.rope.scaling.type = 'wat'"),
        ("qwen3", {"rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier"),
        ("llama", {"expert_count": 8, "expert_used_count": 2}, {}, "llama.expert_count = 8"),
        ("llama", {}, {"rope_freqs.weight": [1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]}, "rope_freqs.weight"),
        ("llama", {}, {"blk.0.attn_q_norm.weight": [1.0] * 16}, "has the tensor blk.0.attn_q_norm.weight"),
        ("llama", {}, {"blk.2.attn_q.bias": [1.0] * 64}, "has the tensor blk.2.attn_q.bias"),
        ("qwen2", {"rope.dimension_count": 8}, {}, "qwen2.rope.dimension_count = 8"),
        ("llama", {"split.count": 3}, {}, "split.count = 3"),
        ("llama", {"general.type": "adapter"}, {}, "general.type = 'adapter'"),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(
    tmp_path: Path, family: str, keys: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as failure:
        converted(tmp_path, make_model(family), keys, tensors)
    assert said in str(failure.value)


def test_keys_that_nobody_knows_are_named(tmp_path: Path) -> None:
    keys = {"flux.capacitor": 1.21, "general.whatever": "x", "tokenizer.ggml.pre": "strange"}
    lines: list[str] = []
    file = write_gguf(tmp_path / "m.gguf", make_model("llama"), keys)
    convert(file, tmp_path / "made", lines.append)
    assert "the GGUF file has keys that nothing reads: llama.flux.capacitor" in lines
    assert "tokenizer.ggml.pre is 'strange', which is unknown: texts are cut as GPT-2 does" in lines


@pytest.mark.parametrize("has_blank", [True, False, None])
def test_a_sentencepiece_text_begins_with_a_blank_where_the_file_says_so(
    tmp_path: Path, has_blank: bool | None
) -> None:
    keys = {} if has_blank is None else {"tokenizer.ggml.add_space_prefix": has_blank}
    folder = converted(tmp_path, make_model("llama"), keys, tokenizer="llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("hi", add_special_tokens=False).ids
    assert (tokenizer.id_to_token(ids[0]) == "▁") is (has_blank is not False)
    for text in ("hi", " hi", "  a  b") if has_blank is False else ("hi", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_sampling_that_is_not_served_reaches_the_folder(tmp_path: Path) -> None:
    folder = converted(tmp_path, make_model("llama"), {"general.sampling.mirostat": 2, "general.sampling.temp": 0.5})
    content = json.loads((folder / "generation_config.json").read_text())
    assert (content["mirostat"], content["temperature"]) == (2, 0.5)
