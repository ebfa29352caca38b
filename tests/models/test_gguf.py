"""What a GGUF file says of the ends of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType

from pdserve.models.gguf import end_of_generation_ids


def write(file: Path, control: list[str], ordinary: tuple[str, ...] = ("a", "b"), **ids: int) -> Path:
    """A GGUF file with a vocabulary, first the control tokens, and no tensors."""
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*control, *ordinary])
    writer.add_token_types([TokenType.CONTROL] * len(control) + [TokenType.NORMAL] * len(ordinary))
    for name, token_id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"eos": 0}, {0}),
        ({"eos": 0, "eot": 2}, {0, 2}),
        ({"eos": 0, "eot": 2, "eom": 1}, {0, 1, 2}),
        ({"eot": 2}, {2}),
        ({"bos": 1, "padding": 1}, set()),
    ],
)
def test_every_key_of_an_end_counts(tmp_path: Path, ids: dict[str, int], expected: set[int]) -> None:
    assert end_of_generation_ids(write(tmp_path / "m.gguf", ["<x>", "<y>", "<z>"], **ids)) == expected


@pytest.mark.parametrize("name", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "</s>"])
def test_a_control_token_with_the_name_of_an_end_counts(tmp_path: Path, name: str) -> None:
    assert end_of_generation_ids(write(tmp_path / "m.gguf", ["<x>", name], eos=0)) == {0, 1}


def test_ordinary_tokens_are_no_ends(tmp_path: Path) -> None:
    assert end_of_generation_ids(write(tmp_path / "m.gguf", ["<x>"], ("</s>", "<EOT>"), eos=0)) == {0}


def test_the_mark_between_two_messages_of_one_answer_is_no_end(tmp_path: Path) -> None:
    harmony = ["<x>", "<|return|>", "<|call|>", "<|end|>"]
    assert end_of_generation_ids(write(tmp_path / "m.gguf", harmony, eos=1)) == {1, 2}
