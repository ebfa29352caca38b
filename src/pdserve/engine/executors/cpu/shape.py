"""What the CPU executor must know of a model, read from its config.json alone; and which models it refuses, by name.

Torch-free and transformers-free. The defaults are those that each architecture's configuration has in transformers,
for files that leave a field out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.models.context_length import context_length

_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
}
ARCHITECTURES = tuple(_DEFAULTS)
_MAX_HEAD_DIM = 512
_HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class CpuShape:
    """Geometry of a Llama-like decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    has_qk_norm: bool
    is_tied: bool
    biased_projections: frozenset[str]
    """Matrices of a layer that have a bias: q_proj, down_proj, …"""
    windows: tuple[int, ...]
    """Per layer: keys a query sees, itself included; 0 = all."""

    @property
    def num_qkv_rows(self) -> int:
        """Rows of the query, key and value projections together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_layer_weights(self) -> int:
        """Values in the matrices of one layer."""
        attention = self.num_qkv_rows + self.num_heads * self.head_dim
        return self.hidden_size * (attention + 3 * self.intermediate_size)


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the fields that its file left out."""
    return {**_DEFAULTS.get(config.get("model_type", ""), {}), **config}


def read_shape(config: dict[str, Any]) -> CpuShape:
    """Read a configuration that `why_unsupported` does not refuse."""
    config = with_defaults(config)
    num_heads = int(config["num_attention_heads"])
    return CpuShape(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        vocab_size=int(config["vocab_size"]),
        max_positions=context_length(config) or 0,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        has_qk_norm=config["model_type"] == "qwen3",
        is_tied=bool(config.get("tie_word_embeddings", False)),
        biased_projections=_biased_projections(config),
        windows=_windows(config),
    )


def why_unsupported(config: dict[str, Any]) -> str | None:
    """A reason that names the field, or None when the kernels can run this model."""
    if config.get("model_type") not in _DEFAULTS:
        return f"architecture {config.get('model_type')!r} (the CPU kernels run {', '.join(ARCHITECTURES)})"
    missing = [name for name in _REQUIRED if not config.get(name)]
    if missing:
        return f"its config.json lacks {', '.join(missing)}"
    if config.get("quantization_config"):
        return "a quantised checkpoint (quantization_config)"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r}"
    return _odd_heads(read_shape(config))


def _odd_heads(shape: CpuShape) -> str | None:
    if shape.head_dim % _HEAD_DIM_MULTIPLE or shape.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {shape.head_dim} (a multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM} is needed)"
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} heads over {shape.num_kv_heads} KV heads"
    return None


_REQUIRED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


def _biased_projections(config: dict[str, Any]) -> frozenset[str]:
    """Matrices with a bias, as the architectures of transformers have them."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    match config["model_type"]:
        case "qwen2":
            return frozenset(attention[:3])
        case "llama":
            return frozenset(
                (*(attention if config.get("attention_bias") else ()), *(mlp if config.get("mlp_bias") else ()))
            )
        case "qwen3":
            return frozenset(attention if config.get("attention_bias") else ())
        case _:
            return frozenset()


def _windows(config: dict[str, Any]) -> tuple[int, ...]:
    num_layers, window = int(config["num_hidden_layers"]), int(config.get("sliding_window") or 0)
    match config["model_type"]:
        case "mistral":
            return (window,) * num_layers
        case "qwen2" | "qwen3" if config.get("use_sliding_window"):
            first = int(config.get("max_window_layers", 28))
            named = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * num_layers
            return tuple(window if kind == "sliding_attention" else 0 for kind in named[:num_layers])
        case _:
            return (0,) * num_layers
