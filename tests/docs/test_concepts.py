"""Numbers of docs/concepts.md are those of the code and of the demo model; each section names its code and test."""

from __future__ import annotations

import re

import pytest
import torch

from pdserve.engine.executors.base import KvCacheSpec
from pdserve.errors import ModelError
from pdserve.models.demo import find_demo_gguf

from .documents import ROOT

PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
SPEC = KvCacheSpec(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.float32)


def test_the_formula_gives_what_the_code_allocates() -> None:
    num_bytes = SPEC.bytes_per_token
    assert f"2 · 30 · 3 · 64 · 4 = {num_bytes:,} in fp32, {num_bytes // 2:,} in bf16" in PAGE
    assert f"({SPEC.block_bytes:,} bytes here)" in PAGE
    assert f"2,000 tokens has {2000 * num_bytes / 1e6:.0f} MB" in PAGE
    assert f"8,192 tokens {8192 * num_bytes / 1e6:.0f} MB" in PAGE


def test_the_geometry_is_that_of_the_demo_model() -> None:
    try:
        file = find_demo_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    from gguf import GGUFReader  # noqa: PLC0415  only where the model is installed

    reader = GGUFReader(file)
    read = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    heads, hidden = read["attention.head_count"], read["embedding_length"]
    assert read["block_count"] == SPEC.num_layers
    assert (heads, read["attention.head_count_kv"]) == (9, SPEC.num_kv_heads)
    assert (hidden, hidden // heads) == (576, SPEC.head_dim)
    assert (read["vocab_size"], read["context_length"]) == (49_152, 8_192)
    num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert f"({4 * num_weights / 1e6:.0f} MB in fp32)" in PAGE


def test_each_section_ends_at_its_code_and_its_test() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 7
    for section in sections:
        end = re.split(r"Code:\s", section.rstrip())
        assert len(end) == 2, section[:60]
        assert re.search(r"tests?:\s+`tests/", end[1]), section[:60]
