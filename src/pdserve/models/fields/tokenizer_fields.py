"""Every field of tokenizer_config.json. The tokens and how texts are cut come from tokenizer.json alone."""

from __future__ import annotations

from pdserve.models.fields.treatment import Fields, each, harmless, refused, used

_FILE = harmless("tokenizer.json says it all")

TOKENIZER_CONFIG: Fields = {
    **each(
        "bos_token eos_token unk_token sep_token pad_token cls_token mask_token",
        used("a control token, and its name in chat templates"),
    ),
    **each("eot_token eom_token", used("ends of a turn and of a message")),
    **each(
        "additional_special_tokens extra_special_tokens model_specific_special_tokens",
        used("further control tokens, and their names in chat templates"),
    ),
    "added_tokens_decoder": used("tokens beside the vocabulary's, and how they are found in texts"),
    **each("add_bos_token add_eos_token", harmless("what a text begins and ends with is tokenizer.json's")),
    "chat_template": used("the chat template, where the folder has no chat_template.jinja"),
    "split_special_tokens": refused("control tokens in prompts are tokens", False),
    **each("add_prefix_space add_dummy_prefix_space legacy trim_offsets errors do_lower_case strip_accents", _FILE),
    **each("tokenizer_class backend tokenizer_file vocab_file merges_file sp_model_kwargs unk_id", _FILE),
    **each(
        "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        harmless("texts are never changed after decoding: it could not be undone"),
    ),
    "spaces_between_special_tokens": harmless("texts are never changed after decoding"),
    **each("model_max_length max_len max_length", harmless("the context length is the model's")),
    **each(
        "padding_side pad_to_multiple_of pad_token_type_id padding stride truncation_strategy truncation",
        harmless("texts are not padded, and cut only by a request's truncate_prompt_tokens"),
    ),
    "truncation_side": harmless("a request says which end it wants cut"),
    **each("model_input_names return_token_type_ids", harmless("models get token ids alone")),
    **each(
        "name_or_path processor_class auto_map is_local local_files_only special_tokens_map_file files_loaded verbose"
        " use_fast _commit_hash tokenizer_version trust_remote_code image_processor_type",
        harmless("a name, or how a library finds the file"),
    ),
    **each("response_schema response_template", harmless("answers are read by the gateway's own parsers")),
    "chat_control_tokens": harmless("which tokens a client's text may not become is found from the template itself"),
    "use_default_system_prompt": harmless("the chat template writes the system message"),
    "fix_mistral_regex": harmless("a folder's own tokenizer.json is taken as it is"),
    **each("image_token boi_token eoi_token audio_token video_token", used("further control tokens")),
}
