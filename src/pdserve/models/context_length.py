"""How many tokens of context a config.json stands for, with whatever stretches its RoPE. Torch-free.

A RoPE of type linear was trained on `max_position_embeddings` and reaches `factor` times as far; yarn reaches `factor`
times its `original_max_position_embeddings`. Of llama3 the field tells the stretched length already, and so it does
for Gemma 3, whose layers are scaled one by one. Types whose angles change with the longest sequence of a batch
(dynamic, longrope) are served up to the length where they begin to change: neighbours would change a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_CHANGING_TYPES = frozenset({"dynamic", "longrope", "su"})


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens that can be served, out of a text model's configuration of any generation; None: it does not say."""
    declared = next((config[name] for name in _LENGTH_FIELDS if isinstance(config.get(name), int)), None)
    if declared is None:
        return None
    per_layer_type = list(_rope_tables(config))
    lengths = [_reach(config, table, declared, is_only=len(per_layer_type) == 1) for table in per_layer_type]
    return min(lengths, default=declared)


def _rope_tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One of the whole model, or one for each type of layer (transformers 5)."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(found, Mapping):
        return
    nested = [table for table in found.values() if isinstance(table, Mapping)]
    yield from nested or [found]


def _reach(config: Mapping[str, Any], table: Mapping[str, Any], declared: int, *, is_only: bool) -> int:
    original = config.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
    original = original if isinstance(original, int) else declared
    factor = table.get("factor")
    stretch = factor if isinstance(factor, int | float) and factor > 1 and is_only else 1
    match table.get("rope_type") or table.get("type"):
        case "linear" if not str(config.get("model_type", "")).startswith("gemma3"):
            return int(declared * stretch)
        case "yarn":
            return max(declared, int(original * stretch))
        case kind if kind in _CHANGING_TYPES:
            return min(declared, original)
        case _:
            return declared
