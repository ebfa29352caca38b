"""Every metadata key of a GGUF file that holds a model of the ten families: used, refused, or harmless.

Keys of one architecture (`llama.context_length`) stand here without it. A key that ends in `*` stands for all that
begin so.
"""

from __future__ import annotations

from pdserve.models.fields.treatment import Fields, FolderField, each, harmless, refused, used

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Those of the ten families that transformers reads from GGUF files; mistral is a llama with that in its name."""

_NO_SUCH = "this architecture has no such thing"
_STATE = refused("layers with a state are not served", 0)

OF_ARCHITECTURE: Fields = {
    **each(
        "vocab_size context_length embedding_length block_count feed_forward_length attention.head_count"
        " attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon",
        used("its shape"),
    ),
    "rope.dimension_count": used("how much of a head is rotated; a part of it only in phi3"),
    "rope.freq_base": used("the base of rotary positions"),
    "rope.freq_base_swa": used("gemma3: their base in layers with a window; elsewhere refused"),
    **each(
        "rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor"
        " rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scale_linear",
        used("how rotary positions are stretched: linear, yarn, longrope"),
    ),
    **each("rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor", refused("only 1 is served", 1, 1.0, -1.0)),
    "rope.scaling.yarn_log_multiplier": refused("a stretching that is not served", 0, 0.0),
    "rope.scaling.alpha": refused("a stretching that is not served", 0, 0.0, 1.0),
    "rope.scaling.finetuned": harmless("says how the model was made"),
    "attention.sliding_window": used(
        "gemma2, gemma3, mistral, phi3: how far a layer with a window sees; elsewhere refused"
    ),
    "attention.sliding_window_pattern": used(
        "gemma2, gemma3: accepted where it is what their layers are; else refused"
    ),
    "attn_logit_softcapping": used("gemma2: a limit of attention scores; elsewhere refused"),
    "final_logit_softcapping": used("gemma2, gemma3: a limit of logits; elsewhere refused"),
    "attention.scale": used("accepted where it is what the heads' size says; else refused"),
    **each(
        "logit_scale embedding_scale residual_scale attention.output_scale activation_sparsity_scale",
        refused("a factor that this architecture does not apply", 0, 0.0, 1, 1.0),
    ),
    **each("attention.layer_norm_epsilon attention.group_norm_epsilon", refused("the norms are RMS norms")),
    "attention.causal": refused("a decoder that sees what follows cannot be served", True),
    **each(
        "use_parallel_residual swin_norm attention.max_alibi_bias attention.clamp_kqv", refused(_NO_SUCH, False, 0, 0.0)
    ),
    "pooling_type": refused("embeddings are not served", 0),
    "tensor_data_layout": harmless("how the file was written"),
    **each(
        "expert* leading_dense_block_count interleave_moe_layer_step moe_every_n_layers moe_latent_size"
        " experts_per_group"
        " router_logit_softcapping",
        refused("this architecture has no experts", 0),
    ),
    "nextn_predict_layers": refused("layers that predict further tokens are not served", 0),
    **each(
        "ssm.* wkv.* kda.* shortconv.* time_mix_extra_dim time_decay_extra_dim token_shift_count"
        " rescale_every_n_layers",
        _STATE,
    ),
    **each(
        "posnet.* convnext.* classifier.* altup.* attention.indexer.* embedding_length_per_layer_input"
        " embedding_length_out"
        " features_length decoder_start_token_id decoder_block_count full_attention_interval n_deepstack_layers"
        " swiglu_clamp_exp swiglu_clamp_shexp dense_* {dense}_feat_in {dense}_feat_out rope.dimension_sections"
        " rope.dimension_count_swa attention.group_norm_groups attention.q_lora_rank attention.kv_lora_rank"
        " attention.decay_lora_rank attention.iclr_lora_rank attention.value_residual_mix_lora_rank"
        " attention.gate_lora_rank"
        " attention.relative_buckets_count attention.temperature_length attention.temperature_scale"
        " attention.key_length_mla attention.value_length_mla attention.key_length_swa attention.value_length_swa"
        " attention.shared_kv_layers",
        refused(_NO_SUCH, 0, 0.0),
    ),
}
"""Keys that begin with the architecture's name."""

GENERAL: Fields = {
    "general.architecture": used("the family"),
    "general.name": used("whether a llama is a mistral"),
    "general.type": refused("only whole models are served", "model"),
    **each(
        "general.sampling.temp general.sampling.top_k general.sampling.top_p general.sampling.min_p"
        " general.sampling.penalty_repeat",
        used("how a request is sampled that does not say"),
    ),
    **each(
        "general.sampling.xtc_probability general.sampling.mirostat",
        used("refused where it is on, by the rule of generation_config.json"),
    ),
    "general.sampling.*": harmless("the order and the sizes of steps that are off"),
    "general.*": harmless("says who made the file, and of what"),
    "quantize.*": harmless("says how the file was made"),
    "imatrix.*": harmless("says how the file was made"),
    **each("split.no", refused("the parts of a file must be merged first", 0)),
    **each("split.count", refused("the parts of a file must be merged first", 0, 1)),
    "split.tensors.count": harmless("the number of tensors"),
    **each(
        "tokenizer.ggml.model tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.scores"
        " tokenizer.ggml.merges",
        used("the vocabulary"),
    ),
    "tokenizer.ggml.pre": used("how texts are cut; an unknown kind is named"),
    "tokenizer.ggml.precompiled_charsmap": used("how texts are normalised"),
    **each(
        "tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id"
        " tokenizer.ggml.eom_token_id"
        " tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id",
        used("control tokens"),
    ),
    **each("tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token", used("what a text begins and ends with")),
    "tokenizer.ggml.add_space_prefix": used("whether a text begins with a blank"),
    "tokenizer.chat_template": used("the chat template"),
    **each("tokenizer.chat_templates tokenizer.chat_template.*", harmless("requests cannot choose a template")),
    "tokenizer.ggml.add_sep_token": refused("concerns classifiers", False),
    "tokenizer.ggml.remove_extra_whitespaces": harmless("concerns tokenizers of another kind"),
    **each(
        "tokenizer.ggml.seperator_token_id tokenizer.ggml.mask_token_id tokenizer.ggml.cls_token_id"
        " tokenizer.ggml.fim_* tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id"
        " tokenizer.ggml.middle_token_id tokenizer.ggml.token_type_count tokenizer.huggingface.json"
        " tokenizer.rwkv.world",
        harmless("tokens that chats and completions do not use"),
    ),
    **each("adapter.* clip.* diffusion.* xielu.*", refused("only language models are served")),
    "GGUF.*": harmless("the file's own header"),
}
"""Keys that are the same for every architecture."""


def gguf_field(fields: Fields, key: str) -> FolderField | None:
    """The entry of a key, else the longest one with a `*` that its beginning fits."""
    if key in fields:
        return fields[key]
    beginnings = [name for name in fields if name.endswith("*") and key.startswith(name[:-1])]
    return fields[max(beginnings, key=len)] if beginnings else None
