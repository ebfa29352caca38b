"""Every field of generation_config.json. What changes answers, and what no request here can ask for, is refused."""

from __future__ import annotations

from pdserve.models.fields.treatment import Fields, each, harmless, refused, used

_SPECULATION = harmless("how fast it is computed, and not what")
_BEAMS = "it belongs to beam search, which is not served"
_METHOD = "the sampling method is not served"

GENERATION_CONFIG: Fields = {
    **each("temperature top_k top_p min_p repetition_penalty", used("how a request is sampled that does not say")),
    "do_sample": used("false: the likeliest token, whatever the temperature"),
    "max_new_tokens": used("the limit of a chat's answer where a request names none"),
    "eos_token_id": used("ends of an answer"),
    **each("typical_p top_h", refused(_METHOD, 1, 1.0)),
    **each("epsilon_cutoff eta_cutoff xtc_probability dry_multiplier mirostat", refused(_METHOD, 0, 0.0)),
    "penalty_alpha": refused(_METHOD, 0, 0.0),
    "dola_layers": refused(_METHOD),
    "guidance_scale": refused(_METHOD, 1, 1.0),
    "token_healing": refused("a prompt's last token is not taken back", False),
    "watermarking_config": refused("answers are not marked"),
    "renormalize_logits": harmless("probabilities are normalised in any case"),
    "remove_invalid_values": harmless("a request with such logits ends with an error"),
    "num_beams": refused(_BEAMS, 1),
    "num_beam_groups": refused(_BEAMS, 1),
    "diversity_penalty": refused(_BEAMS, 0, 0.0),
    "constraints": refused(_BEAMS, []),
    "force_words_ids": refused(_BEAMS, []),
    **each("length_penalty early_stopping low_memory", harmless("they say how beams are ended, and there are none")),
    "num_return_sequences": harmless("a request asks for its number of answers with n"),
    "no_repeat_ngram_size": refused(_METHOD, 0),
    "encoder_no_repeat_ngram_size": refused("there is no encoder", 0),
    "encoder_repetition_penalty": refused("there is no encoder", 1, 1.0),
    "bad_words_ids": refused("tokens are forbidden with the request's bad_words", []),
    "suppress_tokens": refused("tokens are forbidden with the request's logit_bias", []),
    "begin_suppress_tokens": refused("tokens are forbidden with the request's logit_bias", []),
    "sequence_bias": refused("tokens are favoured with the request's logit_bias", {}, []),
    "forced_bos_token_id": refused("an answer begins as the model will"),
    "forced_eos_token_id": refused("an answer ends as the model will"),
    "exponential_decay_length_penalty": refused("answers are bounded by max_tokens alone", []),
    **each("min_length min_new_tokens", refused("a request asks for it with min_tokens", 0)),
    "stop_strings": refused("a request asks for it with stop", []),
    "max_time": refused("a request's deadline is REQUEST_TIMEOUT_S"),
    "max_length": harmless("it counts the prompt; the context length bounds both"),
    "use_cache": harmless("keys and values are always kept"),
    **each(
        "cache_implementation cache_config max_cache_len compile_config disable_compile continuous_batching_config"
        " prefill_chunk_size",
        harmless("how it is computed, and not what"),
    ),
    **each(
        "use_mtp is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold"
        " prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind"
        " assistant_ensemble_weight speculation_type",
        _SPECULATION,
    ),
    **each(
        "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate",
        harmless("what else a library's call returns"),
    ),
    **each("pad_token_id decoder_start_token_id", harmless("texts are not padded")),
    "bos_token_id": harmless("what a text begins with is the tokenizer's"),
    **each(
        "_from_model_config transformers_version _commit_hash generation_kwargs trust_remote_code chat_format",
        harmless("a name, or a version of the program that wrote the file"),
    ),
}
