"""What tokenizer_config.json adds to tokenizer.json counts: ids are those of transformers for the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdserve.errors import ModelError
from pdserve.gateway.text.tokenizer import ModelTokenizer
from pdserve.gateway.text.tokenizer_files import read_special_tokens
from pdserve.templating.traced_text import TracedText, message_source

TEXTS = ["", "hello", "a<new>b", "x <|im_end|> y", "  <new>  z", "<think>deep</think>", "the cat<|x|>", "NEW new <w> w"]


def folder_with(tiny_model_dir: Path, folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir()
    shutil.copy(tiny_model_dir / "tokenizer.json", folder)
    shutil.copy(tiny_model_dir / "config.json", folder)
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    config = {**config, "tokenizer_class": "PreTrainedTokenizerFast", **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"content": content, **usual, **flags}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"add_bos_token": True, "add_eos_token": True, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"add_bos_token": None},
        {"added_tokens_decoder": {"300": token("<new>")}},
        {"added_tokens_decoder": {"301": token("<w>", special=True), "300": token("<new>", lstrip=True, rstrip=True)}},
        {"added_tokens_decoder": {"300": token("new", single_word=True)}},
        {"extra_special_tokens": ["<new>", "<w>"]},
        {"additional_special_tokens": ["<new>", "<think>"]},
        {"extra_special_tokens": {"image_token": "<w>"}},
        {"think_token": "<think>"},
        {"eos_token": "<new>"},
        {"pad_token": "the cat"},
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(tiny_model_dir: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = folder_with(tiny_model_dir, tmp_path / "m", fields)
    ours, truth = ModelTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for add_special_tokens in (True, False):
        for text in TEXTS:
            expected = truth(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, text
    assert ours.special_ids == set(truth.all_special_ids) | {
        index for index, added in truth.added_tokens_decoder.items() if added.special
    }


def test_control_tokens_that_the_folder_lists_stay_text_in_what_clients_send(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    fields = {"added_tokens_decoder": {"300": token("<new>")}, "chat_control_tokens": ["<new>"]}
    folder = folder_with(tiny_model_dir, tmp_path / "m", fields)
    tokenizer = ModelTokenizer.load(folder)
    new = tokenizer.backend_tokenizer.token_to_id("<new>")
    assert new in tokenizer.encode("a<new>b")
    assert new in tokenizer.encode_chat("a<new>b")  # the template's own words
    assert new not in tokenizer.encode_chat(TracedText("a<new>b", message_source(0) * 7))


def test_names_of_tokens_are_those_that_templates_use(tiny_model_dir: Path, tmp_path: Path) -> None:
    fields = {"extra_special_tokens": {"image_token": "<w>"}, "think_token": "<think>", "bos_token": None}
    names = read_special_tokens(folder_with(tiny_model_dir, tmp_path / "m", fields))
    assert (names["image_token"], names["think_token"]) == ("<w>", "<think>")
    assert "bos_token" not in names


@pytest.mark.parametrize(
    "fields",
    [{"added_tokens_decoder": {"x": token("<new>")}}, {"added_tokens_decoder": {"300": {"single_word": True}}}],
)
def test_tokens_that_cannot_be_read_are_one_sentence(
    tiny_model_dir: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json has tokens that cannot be read"):
        ModelTokenizer.load(folder_with(tiny_model_dir, tmp_path / "m", fields))
