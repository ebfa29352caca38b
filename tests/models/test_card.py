"""What the gateway reads of a model: from all places where models of the field keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ModelError, SettingError
from pdserve.models.card import ModelCard
from pdserve.models.tiny_tokenizer import CHAT_TEMPLATE


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that is a model: tests add to it."""
    path = tmp_path / "some-model"
    path.mkdir()
    write_json(
        path / "config.json",
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 7},
    )
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def change(file: Path, **fields: Any) -> None:
    write_json(file, {**(json.loads(file.read_text()) if file.exists() else {}), **fields})


def test_a_tiny_model(tiny_model_dir: Path) -> None:
    card = ModelCard.load(tiny_model_dir)
    assert card.served_name == "tiny"
    assert card.max_model_len == 4096
    assert card.eos_token_ids == {0, 2}
    assert card.chat_template == CHAT_TEMPLATE


def test_eos_is_the_union_of_config_generation_config_and_tokenizer(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": [8, 9]})
    write_json(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"</s>": 3}}, "added_tokens": []})
    assert ModelCard.load(folder).eos_token_ids == {7, 8, 9, 3}


def test_a_model_without_any_eos_has_none(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=None)
    assert ModelCard.load(folder).eos_token_ids == frozenset()


@pytest.mark.parametrize("written", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {}}, "added_tokens": [{"id": 5, "content": "</s>"}]},
        {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["c", -2.0], ["d", -2.0], ["</s>", -3.0]]}},
    ],
)
def test_a_special_token_is_found_wherever_it_is_listed(folder: Path, written: Any, tokenizer: Any) -> None:
    write_json(folder / "tokenizer_config.json", {"eos_token": written})
    write_json(folder / "tokenizer.json", tokenizer)
    assert ModelCard.load(folder).eos_token_ids == {7, 5}


def test_added_tokens_decoder_is_enough(folder: Path) -> None:
    decoder = {"11": {"content": "<eos>"}, "12": {"content": "<bos>"}}
    write_json(folder / "tokenizer_config.json", {"eos_token": "<eos>", "added_tokens_decoder": decoder})
    assert ModelCard.load(folder).eos_token_ids == {7, 11}


def test_a_template_in_a_file_of_its_own_beats_the_tokenizers(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": "old"})
    assert ModelCard.load(folder).chat_template == "old"
    write_json(folder / "chat_template.json", {"chat_template": "newer"})
    assert ModelCard.load(folder).chat_template == "newer"
    (folder / "chat_template.jinja").write_text("newest")
    assert ModelCard.load(folder).chat_template == "newest"


def test_of_named_templates_the_default_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": named})
    assert ModelCard.load(folder).chat_template == "d"


def test_a_model_without_template_cannot_chat(folder: Path) -> None:
    assert ModelCard.load(folder).chat_template is None


def test_a_given_template_is_source_or_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("from a file")
    assert ModelCard.load(folder, chat_template=str(file)).chat_template == "from a file"
    assert ModelCard.load(folder, chat_template="{{ messages }}").chat_template == "{{ messages }}"
    with pytest.raises(SettingError, match="CHAT_TEMPLATE"):
        ModelCard.load(folder, chat_template="missing.jinja")


def test_a_nested_text_config_is_read(folder: Path) -> None:
    text = {"vocab_size": 50, "max_position_embeddings": 32, "eos_token_id": [1, 2]}
    write_json(folder / "config.json", {"architectures": ["XForCausalLM"], "text_config": text})
    card = ModelCard.load(folder)
    assert (card.vocab_size, card.max_model_len, card.eos_token_ids) == (50, 32, {1, 2})


def test_max_model_len_can_be_lowered_but_not_raised(folder: Path) -> None:
    assert ModelCard.load(folder, max_model_len=10).max_model_len == 10
    with pytest.raises(SettingError, match=r"MAX_MODEL_LEN.*65.*at most the model's context length, 64"):
        ModelCard.load(folder, max_model_len=65)


def test_a_model_that_hides_its_context_length_needs_the_setting(folder: Path) -> None:
    write_json(folder / "config.json", {"vocab_size": 10})
    with pytest.raises(ModelError, match="MAX_MODEL_LEN"):
        ModelCard.load(folder)
    assert ModelCard.load(folder, max_model_len=16).max_model_len == 16


def test_the_name_clients_use(folder: Path) -> None:
    assert ModelCard.load(folder).served_name == "some-model"
    assert ModelCard.load(folder, served_name="other").served_name == "other"


@pytest.mark.parametrize("content", ["{broken", "[]"])
def test_a_broken_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelCard.load(folder)


def test_an_encoder_is_refused(folder: Path) -> None:
    write_json(folder / "config.json", {"max_position_embeddings": 10})
    with pytest.raises(ModelError, match="vocab_size"):
        ModelCard.load(folder)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", ["eos_token", "eot_token", "eom_token"])
@pytest.mark.parametrize("is_extra", [False, True])
def test_every_end_that_the_tokenizer_names_counts(folder: Path, place: str, name: str, is_extra: bool) -> None:
    named = {name: {"content": "<turn>"}}
    write_json(folder / place, {"extra_special_tokens": named} if is_extra else named)
    write_json(folder / "tokenizer.json", {"model": {"vocab": {}}, "added_tokens": [{"id": 5, "content": "<turn>"}]})
    assert ModelCard.load(folder).eos_token_ids == {7, 5}
