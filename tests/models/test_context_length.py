"""Each kind of RoPE scaling, as old and new files write it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.models.context_length import context_length

FULL, SLIDING = "full_attention", "sliding_attention"
TABLE: list[tuple[str, dict[str, Any], int | None]] = [
    ("none", {}, 4096),
    ("null", {"rope_scaling": None}, 4096),
    ("default", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
    ("linear", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    ("linear, new", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, 10240),
    ("linear of Gemma 3", {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
    ("yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
    ("yarn without its original", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 8192),
    (
        "yarn, stretched already",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        4096,
    ),
    ("yarn, original outside", {"rope_scaling": {"rope_type": "yarn"}, "original_max_position_embeddings": 1024}, 4096),
    (
        "llama3",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}},
        4096,
    ),
    ("dynamic", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096),
    ("longrope", {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1024}, 1024),
    ("longrope, old name", {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 1024}, 1024),
    ("longrope inside", {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 512}}, 512),
    (
        "a table for each type of layer",
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDING: {"rope_type": "default"}}},
        4096,
    ),
    (
        "longrope in one type of layer",
        {
            "rope_parameters": {
                FULL: {"rope_type": "longrope", "original_max_position_embeddings": 512},
                SLIDING: {"rope_type": "default"},
            }
        },
        512,
    ),
    ("nothing", {"max_position_embeddings": None}, None),
    ("another name", {"max_position_embeddings": None, "n_positions": 77}, 77),
]


@pytest.mark.parametrize(("fields", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_context_length_counts_what_stretches_it(fields: dict[str, Any], expected: int | None) -> None:
    assert context_length({"max_position_embeddings": 4096, **fields}) == expected
