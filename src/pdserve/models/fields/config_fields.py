"""Every field of config.json for the ten families that most folders are of, and fields of others that change results.

`COMMON` holds for all ten; `FAMILY` says what one family reads beside; `FOREIGN` are fields that some family reads,
or another architecture: in a folder of a family that does not read them they are refused, unless they ask for nothing.
"""

from __future__ import annotations

from pdserve.models.fields.treatment import Fields, FolderField, each, harmless, refused, used

_HEADS = "its shape"
_TRAINING = "concerns training"
_OUTPUTS = "what a forward pass returns beside its logits"
_NAMES = "a name, or a version of the program that wrote the folder"
_LABELS = "concerns classifiers"
_MEMORY = "how a program computes, and not what"

COMMON: Fields = {
    **each(
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        " vocab_size",
        used(_HEADS),
    ),
    "max_position_embeddings": used("the context length, with what stretches it"),
    "original_max_position_embeddings": used("the context length before it was stretched"),
    "rms_norm_eps": used("the smallest divisor of a norm"),
    "tie_word_embeddings": used("whether the head is the embedding, where the checkpoint has no head of its own"),
    "rope_theta": used("the base of rotary positions"),
    "rope_scaling": used("how rotary positions are stretched; each of its fields is checked"),
    "rope_parameters": used("rotary positions as newer folders write them; each of its fields is checked"),
    "eos_token_id": used("ends of an answer"),
    "transformers_weights": used("the file that holds the weights"),
    "text_config": used("the language model inside of a model for several media; its fields are those of this table"),
    "is_encoder_decoder": refused("only decoders are served", False),
    "add_cross_attention": refused("only decoders are served", False),
    "cross_attention_hidden_size": refused("only decoders are served"),
    "quantization_config": refused(
        "quantised checkpoints are not read: take the original, and QUANTIZATION=int8 to pack it", {}
    ),
    "compression_config": refused("quantised checkpoints are not read", {}),
    "quantization": refused("quantised checkpoints are not read", {}),
    **each(
        "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop initializer_range use_cache"
        " gradient_checkpointing router_aux_loss_coef output_router_logits embedding_dropout mlp_dropout"
        " classifier_dropout hidden_dropout_prob attention_probs_dropout_prob",
        harmless(_TRAINING),
    ),
    **each("output_attentions output_hidden_states return_dict use_return_dict torchscript", harmless(_OUTPUTS)),
    **each(
        "_name_or_path name_or_path architectures transformers_version _commit_hash unsloth_version unsloth_fixed"
        " model_name mergekit_version library_name tokenizer_class processor_class",
        harmless(_NAMES),
    ),
    **each(
        "id2label label2id problem_type num_labels finetuning_task task_specific_params return_unused_kwargs",
        harmless(_LABELS),
    ),
    **each(
        "chunk_size_feed_forward pretraining_tp use_bfloat16 tf_legacy_loss pruned_heads cache_implementation"
        " _attn_implementation attn_implementation attn_implementation_internal _attn_implementation_autoset"
        " _experts_implementation use_flash_attn use_flash_attention flash_attn fused_mlp fused_bias_fc fp8_config",
        harmless(_MEMORY),
    ),
    **each("dtype torch_dtype params_dtype", harmless("DTYPE decides, and is float32 on a CPU and bfloat16 on a GPU")),
    "bos_token_id": harmless("what a text begins with is the tokenizer's"),
    **each("pad_token_id sep_token_id decoder_start_token_id prefix", harmless("texts are not padded")),
    "auto_map": harmless("code of a folder is never run; model_type decides"),
    "is_decoder": harmless("the model is a decoder"),
    "tie_encoder_decoder": harmless("there is no encoder"),
    "quantization_version": harmless(_NAMES),
    **each(
        "image_token_id image_token_index boi_token_index eoi_token_index mm_tokens_per_image vision_config"
        " audio_config"
        " video_token_id vision_start_token_id vision_end_token_id vision_token_id",
        harmless("concerns other media than text, which requests cannot send"),
    ),
}
"""Fields that mean the same in all ten families."""

_ATTENTION_BIAS = used("biases of the attention")
_MLP_BIAS = used("biases of the feed-forward layers")
_LAYER_TYPES = used("which layers see a window alone")
_WINDOW = used("how far a layer with a window sees")
_USE_WINDOW = used("whether there are layers with a window")
_ACT = {"hidden_act": used("the activation")}
_GEMMA_ACT = {"hidden_activation": used("the activation")}
_QUERY_SCALE = {"query_pre_attn_scalar": used("the scale of attention")}

FAMILY: dict[str, Fields] = {
    "llama": {**_ACT, "attention_bias": _ATTENTION_BIAS, "mlp_bias": _MLP_BIAS},
    "qwen2": {
        **_ACT,
        "use_sliding_window": _USE_WINDOW,
        "sliding_window": _WINDOW,
        "max_window_layers": used("the first layer with a window"),
        "layer_types": _LAYER_TYPES,
    },
    "qwen3": {
        **_ACT,
        "attention_bias": _ATTENTION_BIAS,
        "use_sliding_window": _USE_WINDOW,
        "sliding_window": _WINDOW,
        "max_window_layers": used("the first layer with a window"),
        "layer_types": _LAYER_TYPES,
    },
    "mistral": {**_ACT, "sliding_window": _WINDOW},
    "gemma2": {
        **_GEMMA_ACT,
        **_QUERY_SCALE,
        "attention_bias": _ATTENTION_BIAS,
        "sliding_window": _WINDOW,
        "layer_types": _LAYER_TYPES,
        "attn_logit_softcapping": used("a limit of attention scores"),
        "final_logit_softcapping": used("a limit of logits"),
    },
    "gemma3_text": {
        **_GEMMA_ACT,
        **_QUERY_SCALE,
        "attention_bias": _ATTENTION_BIAS,
        "sliding_window": _WINDOW,
        "layer_types": _LAYER_TYPES,
        "final_logit_softcapping": used("a limit of logits"),
        "rope_local_base_freq": used("the base of rotary positions in layers with a window"),
        **each("sliding_window_pattern _sliding_window_pattern", used("every how many layers one sees everything")),
    },
    "phi3": {
        **_ACT,
        "sliding_window": _WINDOW,
        "partial_rotary_factor": used("the share of a head that is rotated"),
    },
    "smollm3": {
        **_ACT,
        "attention_bias": _ATTENTION_BIAS,
        "mlp_bias": _MLP_BIAS,
        "use_sliding_window": _USE_WINDOW,
        "sliding_window": _WINDOW,
        "layer_types": _LAYER_TYPES,
        "no_rope_layers": used("layers without positions"),
        "no_rope_layer_interval": used("every how many layers one has no positions, where no_rope_layers is absent"),
    },
    "granite": {
        **_ACT,
        "attention_bias": _ATTENTION_BIAS,
        "mlp_bias": _MLP_BIAS,
        "embedding_multiplier": used("a factor on embeddings"),
        "residual_multiplier": used("a factor on what a layer adds"),
        "attention_multiplier": used("the scale of attention"),
        "logits_scaling": used("a divisor of logits"),
    },
    "olmo2": {**_ACT, "attention_bias": _ATTENTION_BIAS},
}
"""Family (model_type) → what it reads beside the common fields."""
FAMILIES = tuple(FAMILY)

_SCALES = refused("a factor that this family does not apply", 1, 1.0)
_STATE = refused("layers with a state are not served", 0, [], False)
_EXPERTS = refused("this family has no experts", 0, 1, [])
_ROTATION = refused("rotary positions that this family does not have", False, 1, 1.0, [])
_LATENT = refused("multi-head latent attention is not served", 0)
_STRUCTURE = refused("a structure that this family does not have", False, 0, [])

FOREIGN: Fields = {
    **each("attention_bias mlp_bias", harmless("the tensors tell: one that nothing reads is refused")),
    **each(
        "use_bias bias qkv_bias use_qkv_bias attention_out_bias lm_head_bias add_bias_linear add_qkv_bias",
        harmless("the tensors tell: one that nothing reads is refused"),
    ),
    "hidden_act": refused("this family reads hidden_activation", "gelu", "gelu_pytorch_tanh"),
    "hidden_activation": refused("this family reads hidden_act"),
    "activation_function": refused("this family reads hidden_act", "silu"),
    "mlp_activation": refused("this family reads hidden_act", "silu"),
    "sliding_window": refused("this family has no layers with a window"),
    "use_sliding_window": refused("this family does not switch its window on or off"),
    "max_window_layers": refused("this family does not count its layers with a window"),
    "layer_types": refused("this family has layers of one type alone"),
    **each("sliding_window_pattern _sliding_window_pattern", refused("this family has layers of one type alone")),
    **each("attention_chunk_size num_kv_shared_layers attn_layer_period", _STRUCTURE),
    **each("use_bidirectional_attention", refused("a decoder that sees what follows cannot be served", False)),
    "is_causal": refused("a decoder that sees what follows cannot be served", True),
    **each(
        "attn_logit_softcapping attn_logits_soft_cap",
        refused("attention scores of this family have no limit", 0, 0.0),
    ),
    **each("final_logit_softcapping logits_soft_cap", refused("logits of this family have no limit", 0, 0.0)),
    "query_pre_attn_scalar": refused("the scale of this family's attention is its head_dim's"),
    **each(
        "embedding_multiplier residual_multiplier logits_scaling logit_scale logits_scale"
        " output_multiplier lm_head_multiplier key_multiplier ssm_multipliers mlp_multipliers width_multiplier"
        " scale_emb scale_depth embedding_scale residual_scale attention_scale",
        _SCALES,
    ),
    **each("attention_multiplier dim_model_base", refused("a factor that this family does not apply")),
    "rope_local_base_freq": refused("rotary positions that this family does not have"),
    **each(
        "scale_embedding normalize_embedding scale_embeddings normalize_embeddings",
        refused("a factor that this family does not apply", False),
    ),
    "no_rope_layers": refused("every layer of this family has positions", []),
    **each("no_rope_layer_interval nope_layer_interval", refused("every layer of this family has positions", 0)),
    **each(
        "partial_rotary_factor rotary_pct rotary_percent rope_ratio rope_interleave rope_interleaved use_mrope"
        " mrope_section alibi use_alibi rope_alpha rotary_ndims",
        _ROTATION,
    ),
    "rotary_dim": refused("rotary positions that this family does not have"),
    "rotary_emb_base": refused("this family reads rope_theta"),
    "position_embedding_type": refused("this family has rotary positions", "rope", "rotary"),
    "attn_temperature_tuning": refused("attention scores of this family do not depend on the position", False, 0),
    "norm_type": refused("the norms of this family are RMS norms", "rms_norm", "rmsnorm"),
    **each("layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon", refused("this family reads rms_norm_eps")),
    **each(
        "use_qk_norm qk_norm qk_layernorm use_qk_layernorm query_key_norm",
        refused("queries and keys of this family are not normalised", False),
    ),
    **each("clip_qkv clamp_kqv qkv_clip", refused("queries and keys of this family have no limit", 0)),
    **each(
        "parallel_residual use_parallel_residual parallel_attn post_norm use_post_norm sandwich_norm"
        " use_attention_sinks"
        " attention_sinks add_attention_sink attn_output_gate use_gated_attention use_value_residual swiglu_limit",
        _STRUCTURE,
    ),
    **each(
        "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok num_experts_per_token"
        " moe_intermediate_size moe_topk first_k_dense_replace",
        _EXPERTS,
    ),
    **each("kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim", _LATENT),
    **each(
        "ssm_cfg mamba_d_state mamba_n_heads state_size conv_L_cache linear_num_key_heads linear_conv_kernel_dim",
        _STATE,
    ),
    "num_nextn_predict_layers": harmless("layers that predict further tokens are not used"),
}
"""Fields that some architectures read: for a family that reads one, its entry in FAMILY holds."""

NORMS_QUERIES = frozenset({"qwen3", "gemma3_text", "olmo2"})
"""Families whose queries and keys are normalised anyway."""
ALWAYS_WINDOWED = frozenset({"mistral", "phi3", "gemma2", "gemma3_text"})
"""Families whose window is on wherever it has a size."""

GENERATION: Fields = each(
    "temperature top_k top_p min_p repetition_penalty do_sample",
    used("how answers are sampled, where there is no generation_config.json"),
)
"""Older folders say in config.json how to sample."""


def field_of(family: str, name: str) -> FolderField | None:
    """What a field of config.json is to a family of `FAMILIES`; None: it is unknown."""
    return FAMILY[family].get(name) or COMMON.get(name) or FOREIGN.get(name)
