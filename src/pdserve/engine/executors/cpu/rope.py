"""Rotary position tables from a config.json, the way transformers computes them but without importing it.

Never sees a model: a dictionary in, tables out. Scalings whose frequencies depend on the length of the running
text (dynamic beyond the trained context, longrope) are refused: a cached key could not keep its angle.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_DEFAULT_THETA = 10_000.0
SERVED_TYPES = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rope fields of either generation of config.json, flat: `rope_type`, `rope_theta`, and those of the type."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_type", found.get("type", "default"))
    if found.get("rope_theta") is None:
        found["rope_theta"] = config.get("rope_theta") or _DEFAULT_THETA
    if found.get("original_max_position_embeddings") is None:
        found["original_max_position_embeddings"] = (
            config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        )
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return found


def why_unsupported(config: dict[str, Any]) -> str | None:
    """A reason that names the rope setting, or None."""
    parameters = rope_parameters(config)
    if parameters["rope_type"] not in SERVED_TYPES:
        return f"rope type {parameters['rope_type']!r}"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary embedding"
    return None


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """`[head_dim / 2]` fp32 radians per token, and the factor on cosines and sines (yarn)."""
    parameters = rope_parameters(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    wavelengths = parameters["rope_theta"] ** exponents
    match parameters["rope_type"]:
        case "linear":
            return 1.0 / wavelengths / parameters["factor"], 1.0
        case "llama3":
            return _llama3(1.0 / wavelengths, parameters), 1.0
        case "yarn":
            return _yarn(wavelengths, parameters, head_dim, int(config["max_position_embeddings"]))
        case _:
            return 1.0 / wavelengths, 1.0


def rope_tables(config: dict[str, Any], head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[num_positions, head_dim / 2]`, fp32."""
    frequencies, scaling = inverse_frequencies(config, head_dim)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return (angles.cos() * scaling).contiguous(), (angles.sin() * scaling).contiguous()


def _llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Long waves slowed down by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = parameters["original_max_position_embeddings"]
    lengths = 2 * math.pi / frequencies
    blend = (context / lengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slowed = torch.where(lengths > context / low, frequencies / factor, frequencies)
    is_between = (lengths >= context / high) & (lengths <= context / low)
    return torch.where(is_between, blended, slowed)


def _yarn(wavelengths: Tensor, parameters: dict[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolated below, extrapolated above, a ramp over the dimensions between."""
    context = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / context
    low, high = _yarn_ramp_ends(parameters, head_dim, context)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_attention_factor(parameters, factor)


def _yarn_ramp_ends(parameters: dict[str, Any], head_dim: int, context: int) -> tuple[float, float]:
    def dimension_of(rotations: float) -> float:
        base = 2 * math.log(parameters["rope_theta"])
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / base

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
