"""Folders that say more than is read: they are served with a line, or end the start with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import build, changed, served, truth
from safetensors.torch import load_file, save_file

from pdserve.engine.loader import load_executor
from pdserve.errors import ModelError, SettingError
from pdserve.models.fields.check import check_generation, check_tokenizer
from pdserve.models.fields.tokenizer_fields import TOKENIZER_CONFIG
from pdserve.models.resolve import resolve_model


def test_a_folder_with_an_unknown_field_is_served_and_the_field_is_named(tmp_path: Path) -> None:
    folder = changed(build(tmp_path / "m", "llama"), flux_capacitor=1.21, my_note="hello")
    lines: list[str] = []
    assert resolve_model(str(folder), tmp_path, lines.append) == folder
    (line,) = lines
    assert line.startswith("config.json has fields that nothing reads")
    assert line.endswith("flux_capacitor, my_note")


def test_a_folder_with_a_field_that_changes_results_does_not_start(tmp_path: Path) -> None:
    folder = changed(build(tmp_path / "m", "llama"), embedding_multiplier=12.0)
    with pytest.raises(ModelError, match=r"embedding_multiplier is 12\.0, which models of type 'llama' cannot have"):
        resolve_model(str(folder), tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [5, 6]),
        ("begin_suppress_tokens", [5]),
        ("bad_words_ids", [[5]]),
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("min_new_tokens", 10),
        ("guidance_scale", 1.5),
        ("typical_p", 0.9),
        ("forced_eos_token_id", 2),
        ("sequence_bias", {"5": -1.0}),
        ("stop_strings", ["\n"]),
        ("exponential_decay_length_penalty", [15, 1.6]),
    ],
)
def test_sampling_that_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"{name} is .*set GENERATION_CONFIG to off"):
        check_generation({name: value}, Path("m/generation_config.json"))


def test_a_tokenizer_that_would_read_prompts_otherwise_is_refused() -> None:
    file = Path("m/tokenizer_config.json")
    with pytest.raises(ModelError, match="split_special_tokens is True"):
        check_tokenizer({"split_special_tokens": True}, file)
    assert check_tokenizer({"split_special_tokens": False, "my_token": "<x>", "surprise": 1}, file) == ["surprise"]
    assert check_tokenizer(dict.fromkeys(TOKENIZER_CONFIG), file) == []


def test_errors_of_transformers_own_code_are_one_sentence(tmp_path: Path) -> None:
    folder = changed(build(tmp_path, "olmo2"), pad_token_id=4000)
    with pytest.raises((ModelError, SettingError)) as failure:
        load_executor(folder, device="cpu", dtype="float32")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.extra_norm.weight", "model.layers.0.mlp.down_proj.bias", "lm_head.bias"]
)
def test_weights_that_nothing_reads_are_refused_by_name(tmp_path: Path, family: str, name: str) -> None:
    folder = build(tmp_path, family)
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(16)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"has the tensor {name}, for which its config\.json leaves no room"):
        served(folder)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_tensors_that_are_no_weights_of_this_model_are_left_alone(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path, family)
    before = truth(folder)
    file = folder / "model.safetensors"
    more = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.4.embed_tokens.weight",
        "vision.layers.0.a.weight",
    )
    save_file({**load_file(file), **{name: torch.ones(16) for name in more}}, file, metadata={"format": "pt"})
    assert torch.allclose(served(folder), before, atol=2e-4)
