"""Fields whose value asks for nothing where other fields of the same config.json say the same: what the family does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.models.fields.config_fields import ALWAYS_WINDOWED, NORMS_QUERIES


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A configuration around one of its fields."""

    family: str
    config: Mapping[str, Any]

    @property
    def window(self) -> Any:
        """How far a layer with a window would see, tokens."""
        return self.config.get("sliding_window")

    @property
    def is_windowed(self) -> bool:
        """Whether layers of this family would see a window alone."""
        is_on = self.family in ALWAYS_WINDOWED or bool(self.config.get("use_sliding_window"))
        return bool(self.window) and is_on

    @property
    def head_dim(self) -> int | None:
        """Values of a head: as given, else derived."""
        given, size, heads = (self.config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
        if isinstance(given, int):
            return given
        return size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None


def asks_nothing(name: str, value: object, around: Neighbours) -> bool | None:
    """Whether a field that this family does not read says what it does anyway; None: its value alone tells."""
    tell = _TELLS.get(name)
    return None if tell is None else tell(value, around)


def _window(value: object, around: Neighbours) -> bool:
    length = around.config.get("max_position_embeddings")
    is_long = isinstance(value, int) and isinstance(length, int) and value >= length
    return not value or around.config.get("use_sliding_window") is False or is_long


def _layer_types(value: object, around: Neighbours) -> bool:
    kind = "sliding_attention" if around.is_windowed else "full_attention"
    return isinstance(value, list) and set(value) <= {kind}


def _scale(value: object, around: Neighbours) -> bool:
    dim = around.head_dim
    return isinstance(value, float) and dim is not None and abs(value - dim**-0.5) < 1e-6


def _same_as(other: str) -> Callable[[object, Neighbours], bool]:
    return lambda value, around: value == around.config.get(other)


_NORMS = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "query_key_norm")
_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")

_TELLS: dict[str, Callable[[object, Neighbours], bool]] = {
    "sliding_window": _window,
    "use_sliding_window": lambda value, around: not around.window or bool(value) == around.is_windowed,
    "max_window_layers": lambda value, around: not around.is_windowed,
    "layer_types": _layer_types,
    **dict.fromkeys(_PATTERNS, lambda value, around: not around.window or value == 1),
    "no_rope_layers": lambda value, around: isinstance(value, list) and all(value),
    "query_pre_attn_scalar": lambda value, around: value == around.head_dim,
    "rotary_dim": lambda value, around: value == around.head_dim,
    "attention_multiplier": _scale,
    "rotary_emb_base": _same_as("rope_theta"),
    **dict.fromkeys(_EPSILONS, _same_as("rms_norm_eps")),
    **dict.fromkeys(_NORMS, lambda value, around: value is (around.family in NORMS_QUERIES)),
}
