"""What a GGUF file says about sampling becomes the defaults of the folder that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers import GenerationConfig

from pdserve.models.generation_config import USUAL, SamplingDefaults, read_sampling_defaults
from pdserve.models.gguf import sampling_of


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, USUAL),
        ({"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}, SamplingDefaults(0.6, 20, 0.95, 0.05)),
        ({"top_k": 1, "penalty_repeat": 1.3}, SamplingDefaults(top_k=1, repetition_penalty=1.3)),
        ({"temp": 0.0, "top_p": 0.9}, SamplingDefaults(temperature=0.0)),
        ({"temp": 0.7, "top_k": -1}, SamplingDefaults(temperature=0.7)),
    ],
)
def test_the_values_of_a_file_are_those_of_its_folder(
    tmp_path: Path, written: dict[str, float], expected: SamplingDefaults
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in written.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = GenerationConfig(eos_token_id=2)
    made.update(**sampling_of(tmp_path / "model.gguf"))
    made.save_pretrained(tmp_path)
    assert read_sampling_defaults(tmp_path) == expected
