"""Sampling defaults of a model folder: what is read, what is off, and what ends the start with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ModelError
from pdserve.models.generation_config import USUAL, SamplingDefaults, read_sampling_defaults


def written(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_folder_without_the_file_has_the_usual_ones(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == USUAL == SamplingDefaults()


@pytest.mark.parametrize(
    "content", [{}, {"eos_token_id": [1, 2]}, {"temperature": None, "do_sample": None, "top_k": None}]
)
def test_what_a_file_does_not_say_is_as_usual(tmp_path: Path, content: dict[str, Any]) -> None:
    assert read_sampling_defaults(written(tmp_path, content)) == USUAL


def test_all_values_of_a_file(tmp_path: Path) -> None:
    content = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
    }
    expected = SamplingDefaults(0.6, 20, 0.95, 0.05, 1.3, 2048)
    assert read_sampling_defaults(written(tmp_path, {**content, "max_new_tokens": 2048})) == expected


@pytest.mark.parametrize("temperature", [{}, {"temperature": 0.6}, {"temperature": 1}])
def test_a_file_that_switches_sampling_off_takes_the_likeliest_token(tmp_path: Path, temperature: Any) -> None:
    defaults = read_sampling_defaults(written(tmp_path, {"do_sample": False, **temperature}))
    assert defaults.temperature == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 0.5),
        ("top_k", "5"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1.1]),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        read_sampling_defaults(written(tmp_path, {name: value}))
    for part in ("generation_config.json", f"{name} must be ", repr(value)[:20], "GENERATION_CONFIG"):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "{", "5"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_sampling_defaults(tmp_path)
