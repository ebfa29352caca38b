"""Which models the block-major KV layout can serve, told from the configuration alone: by name, before weights load.

Also reads from the configuration how long a context may be. Never touches weights.
"""

from __future__ import annotations

from typing import Any

from pdserve.errors import ModelError, SettingError
from pdserve.log import get_logger
from pdserve.models.context_length import context_length

logger = get_logger(__name__)

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_MLA_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_STATE_FIELDS = ("ssm_cfg", "mamba_d_state", "state_size", "conv_L_cache", "linear_num_key_heads", "attn_layer_period")
_USUAL_CONTEXT = 2048
"""Tokens, for a configuration that names no length."""


def check_supported(config: Any) -> None:
    """Refuse by name what cannot be served.

    Args:
        config: a transformers configuration; text models inside others are looked at.

    Raises:
        ModelError: encoder-decoder, MLA, hybrid (state-space, linear, chunked attention), shared or unequal KV heads.
    """
    config = config.get_text_config()
    name = f"model type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; only decoders are served")
    if any(getattr(config, field, None) for field in _MLA_FIELDS):
        raise ModelError(
            f"{name} uses multi-head latent attention (MLA), whose KV cache has another layout: not served"
        )
    if any(getattr(config, field, None) for field in _STATE_FIELDS):
        raise ModelError(f"{name} is a hybrid or state-space model, whose state is no KV cache: not served")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES)
    if odd:
        raise ModelError(f"{name} has layers of type {', '.join(odd)}; only full and sliding attention are served")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError(f"{name} shares KV between layers: not served")
    if isinstance(getattr(config, "num_key_value_heads", None), list | tuple):
        raise ModelError(f"{name} has another number of KV heads in each layer: not served")


def longest_context(config: Any, wanted: int | None) -> int:
    """The context length to serve, in tokens.

    A RoPE that changes its frequencies with the length of the longest sequence of a batch (dynamic, longrope)
    is served up to the length where it starts to change: in a packed batch neighbours would change a result.

    Args:
        config: a transformers configuration.
        wanted: None, or the model's own length: as long as can be served.

    Raises:
        SettingError: `wanted` exceeds what the model was made for, or falls between what is served and its own length.
    """
    config = config.get_text_config()
    declared = int(getattr(config, "max_position_embeddings", None) or wanted or _USUAL_CONTEXT)
    longest = context_length({**config.to_dict(), "max_position_embeddings": declared}) or declared
    if wanted is None or wanted == declared:
        if longest < declared:
            logger.warning("context length %d instead of %d: beyond, its RoPE depends on the batch", longest, declared)
        return longest
    if wanted > longest:
        raise SettingError("MAX_MODEL_LEN", wanted, f"at most {longest}, the context length of the model")
    return wanted
