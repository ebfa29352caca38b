"""What a GGUF file says of its model, and transformers does not carry over: fields of a config.json, or a refusal.

Pure: keys and a few small tensors in, a dictionary out. The rules are those by which programs for GGUF files compute
with these keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.fields.gguf_fields import ARCHITECTURES, GENERAL, OF_ARCHITECTURE, gguf_field
from pdserve.models.fields.treatment import Treatment

Config = Mapping[str, Any]

_LLAMA3_WAVES = (1.0, 4.0)
"""low_freq_factor and high_freq_factor of every Llama since 3.1."""
_LLAMA3_CONTEXT = 8192
"""Its context length before it was stretched."""
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose scale of attention is another one."""
_SPLITS_OF_GPT2 = (
    "default",
    "gpt-2",
    "gpt2",
    "smollm",
    "olmo",
    "jais",
    "phi-2",
    "mpt",
    "stablelm2",
    "refact",
    "starcoder",
)


@dataclass(frozen=True)
class GgufFacts:
    """The metadata of one file."""

    keys: Mapping[str, Any]
    """Key → value, as the file has them."""
    tensors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The tensors that stretch rotary positions: `rope_freqs.weight`, `rope_factors_short.weight`, …"""

    @property
    def architecture(self) -> str:
        """The family as GGUF files name it."""
        return str(self.keys.get("general.architecture"))

    def get(self, name: str) -> Any:
        """A key of the architecture; None where it is absent."""
        return self.keys.get(f"{self.architecture}.{name}")


def check_keys(facts: GgufFacts) -> list[str]:
    """Names of unknown keys of a file.

    Raises:
        ModelError: a key would change answers, and nothing reads it.
    """
    unknown = []
    for key, value in facts.keys.items():
        own = key.removeprefix(f"{facts.architecture}.")
        known = gguf_field(GENERAL, key) if own == key else gguf_field(OF_ARCHITECTURE, own)
        if known is None:
            unknown.append(key)
        elif known.treatment is Treatment.REFUSED and (own == key or facts.architecture in ARCHITECTURES):
            _require(known.asks_nothing(value), key, value, known.about)
    return unknown


def carried_over(facts: GgufFacts, config: Config, family: str) -> dict[str, Any]:
    """Fields to set in a configuration that transformers made of a file.

    Args:
        facts: of the file.
        config: the configuration so far, as a dictionary.
        family: its model_type.

    Raises:
        ModelError: the file says something that no field of this family can say; names the key.
    """
    if facts.architecture not in ARCHITECTURES:
        return {}
    head = {"head_dim": facts.get("attention.key_length")} if family == "qwen3" else {}
    config = {**config, **{name: value for name, value in head.items() if value is not None}}
    _check_heads(facts, config)
    return {
        **{name: config[name] for name in head},
        "pad_token_id": facts.keys.get("tokenizer.ggml.padding_token_id"),
        **_windows(facts, config, family),
        **_limits(facts, family),
        **_attention_scale(facts, config),
        **_rotation(facts, config, family),
    }


def unknown_split(facts: GgufFacts, known: Callable[[str], bool]) -> str | None:
    """The name of a way of cutting texts that the tokenizer cannot be made with, if it is one."""
    kind = facts.keys.get("tokenizer.ggml.pre")
    is_bytes = facts.keys.get("tokenizer.ggml.model") == "gpt2"
    return kind if is_bytes and isinstance(kind, str) and not known(kind) and kind not in _SPLITS_OF_GPT2 else None


def _require(is_good: bool, key: str, value: object, about: str) -> None:
    if not is_good:
        raise ModelError(f"the GGUF file says {key} = {repr(value)[:60]}, which is not served: {about}")


# --- shape and attention


def _check_heads(facts: GgufFacts, config: Config) -> None:
    dim = _head_dim(config)
    for name in ("attention.key_length", "attention.value_length"):
        value = facts.get(name)
        _require(value in (None, dim), f"{facts.architecture}.{name}", value, f"the heads have {dim} values")
    scale = facts.get("attention.scale")
    is_usual = not scale or math.isclose(scale, dim**-0.5, rel_tol=1e-4)
    _require(is_usual, f"{facts.architecture}.attention.scale", scale, f"the scale of attention is {dim**-0.5:.6f}")


def _windows(facts: GgufFacts, config: Config, family: str) -> dict[str, Any]:
    window, key = facts.get("attention.sliding_window"), f"{facts.architecture}.attention.sliding_window"
    pattern = facts.get("attention.sliding_window_pattern")
    if family in ("mistral", "phi3"):
        return {"sliding_window": window or None}
    if family in ("gemma2", "gemma3_text"):
        kinds = config.get("layer_types") or []
        every = 6 if family == "gemma3_text" else 2
        is_same = pattern in (None, every) or pattern == [kind == "sliding_attention" for kind in kinds]
        _require(is_same, f"{key}_pattern", pattern, f"one layer of {every} sees everything")
        return {}
    is_off = not window or window >= (facts.get("context_length") or 0)
    _require(is_off, key, window, f"{family} has no layers with a window")
    return {}


def _limits(facts: GgufFacts, family: str) -> dict[str, Any]:
    served = {
        "attn_logit_softcapping": family == "gemma2",
        "final_logit_softcapping": family in ("gemma2", "gemma3_text"),
    }
    found = {name: facts.get(name) for name in served}
    for name, value in found.items():
        _require(not value or served[name], f"{facts.architecture}.{name}", value, f"{family} has no such limit")
    return {name: value or None for name, value in found.items() if served[name] and value is not None}


def _attention_scale(facts: GgufFacts, config: Config) -> dict[str, Any]:
    """Nothing in a file tells it: programs for GGUF files know the largest model by its number of layers."""
    if facts.get("block_count") != _LARGEST_GEMMA.get(facts.architecture):
        return {}
    return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


# --- rotary positions


def _rotation(facts: GgufFacts, config: Config, family: str) -> dict[str, Any]:
    table = {"rope_type": "default", **_stretching(facts, config), **_partial(facts, config, family)}
    own = facts.get("rope.freq_base_swa")
    _require(
        own is None or family == "gemma3_text", f"{facts.architecture}.rope.freq_base_swa", own, "one base is served"
    )
    theta = facts.get("rope.freq_base") or 10_000.0
    if family != "gemma3_text":
        changes = {"rope_parameters": {**table, "rope_theta": theta}}
        original = table.get("original_max_position_embeddings")
        return changes | ({"original_max_position_embeddings": original} if family == "phi3" and original else {})
    near = {"rope_type": "default", "rope_theta": own or 10_000.0}
    return {"rope_parameters": {"full_attention": {**table, "rope_theta": theta}, "sliding_attention": near}}


def _stretching(facts: GgufFacts, config: Config) -> dict[str, Any]:
    key = f"{facts.architecture}.rope.scaling.type"
    kind = facts.get("rope.scaling.type") or "none"
    factor = facts.get("rope.scaling.factor") or facts.get("rope.scale_linear") or 1.0
    waves = facts.tensors.get("rope_freqs.weight")
    if facts.tensors.get("rope_factors_short.weight") is not None:
        return _longrope(facts, config)
    if waves is not None and any(abs(value - 1) > 1e-6 for value in waves):
        _require(kind == "none" or factor == 1, key, kind, "rope_freqs.weight stretches the positions already")
        return _llama3(facts, waves, config)
    if kind in ("none", "linear"):
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    _require(kind == "yarn", key, kind, "linear, yarn, longrope with its factors, and Llama 3's are served")
    return _yarn(facts, factor)


def _yarn(facts: GgufFacts, factor: float) -> dict[str, Any]:
    original = facts.get("rope.scaling.original_context_length")
    table = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    betas = {name: facts.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    share = facts.get("rope.scaling.attn_factor") or 1.0
    if share != 1:
        table["attention_factor"] = share * (1 + 0.1 * math.log(factor))
    return {name: value for name, value in {**table, **betas}.items() if value is not None}


def _longrope(facts: GgufFacts, config: Config) -> dict[str, Any]:
    original = facts.get("rope.scaling.original_context_length") or config.get("original_max_position_embeddings")
    table = {
        "rope_type": "longrope",
        "short_factor": list(facts.tensors["rope_factors_short.weight"]),
        "long_factor": list(facts.tensors["rope_factors_long.weight"]),
        "original_max_position_embeddings": original,
        "attention_factor": facts.get("rope.scaling.attn_factor"),
    }
    return {name: value for name, value in table.items() if value is not None}


def _llama3(facts: GgufFacts, waves: Sequence[float], config: Config) -> dict[str, Any]:
    """The parameters whose factors are those of the file; the largest factor is how far the longest waves stretch."""
    low, high = _LLAMA3_WAVES
    factor = round(max(waves), 4)
    theta = facts.get("rope.freq_base") or 10_000.0
    expected = llama3_factors(theta, 2 * len(waves), factor, low, high, _LLAMA3_CONTEXT)
    is_same = all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(waves, expected, strict=True))
    _require(is_same, "rope_freqs.weight", list(waves)[-1], "these factors are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, context: int) -> list[float]:
    """By how much Llama 3.1 slows each wave of a head: 1 for short ones, `factor` for long ones, else a blend."""
    factors = []
    for index in range(0, dim, 2):
        length = 2 * math.pi * theta ** (index / dim)
        smooth = min(1.0, max(0.0, (context / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _partial(facts: GgufFacts, config: Config, family: str) -> dict[str, Any]:
    rotated, dim = facts.get("rope.dimension_count"), _head_dim(config)
    if rotated in (None, dim):
        return {}
    key = f"{facts.architecture}.rope.dimension_count"
    _require(family == "phi3", key, rotated, f"the heads have {dim} values, and {family} rotates whole heads")
    return {"partial_rotary_factor": rotated / dim}
