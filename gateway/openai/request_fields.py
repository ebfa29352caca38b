"""Every field that clients of such APIs send, and what becomes of it: served, refused, or harmless.

A field that would change the answer is served or refused, never ignored. The table drives the refusals, a page of the
documents is made from it, and a test compares it with the request schemas of other packages. Data alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Treatment(StrEnum):
    """What becomes of a field."""

    SERVED = "served"
    REFUSED = "refused"
    """400 `not_supported`, unless the value asks for nothing."""
    HARMLESS = "harmless"
    """Accepted; the answer does not depend on it."""


@dataclass(frozen=True)
class RequestField:
    """One field of one endpoint."""

    treatment: Treatment
    about: str
    """Refused: what is not served and what to do instead. Harmless: why nothing depends on it."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing, beside null."""

    def is_neutral(self, value: object) -> bool:
        """Whether a value of a refused field asks for nothing; true is not 1."""
        return value is None or any(
            value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in self.neutral
        )


Table = Mapping[str, RequestField]


def _served(*names: str) -> dict[str, RequestField]:
    return {name: RequestField(Treatment.SERVED, "") for name in names}


def _harmless(about: str, *names: str) -> dict[str, RequestField]:
    return {name: RequestField(Treatment.HARMLESS, about) for name in names}


def _refused(about: str, *neutral: Any, names: str) -> dict[str, RequestField]:
    return {name: RequestField(Treatment.REFUSED, about, neutral) for name in names.split()}


_SAMPLING = _served(
    *("model", "n", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs"),
    *("truncate_prompt_tokens", "truncation_side", "stream", "stream_options", "response_format", "priority"),
    *("cache_salt", "return_token_ids", "return_tokens_as_token_ids"),
)

_UNSERVED = {
    **_refused("beam search is not served", False, names="use_beam_search"),
    **_refused("it belongs to beam search, which is not served", 1, names="length_penalty"),
    **_refused("it belongs to beam search, which is not served", False, names="early_stopping"),
    **_refused(
        "structured output is not supported yet",
        names="structured_outputs guided_json guided_regex guided_choice guided_grammar",
    ),
    **_refused("prompts are given as text or token ids, embeddings are not served", "", [], names="prompt_embeds"),
    **_refused(
        "log-probabilities are told of the likeliest tokens alone; ask for more of them with logprobs or top_logprobs",
        [],
        names="logprob_token_ids prompt_logprob_token_ids",
    ),
    **_refused("log-probabilities are told of the whole prompt", 0, names="prompt_logprob_start"),
    **_refused("log-probabilities are told as objects", False, names="flat_logprobs"),
    **_refused("code of a client is not run", [], names="logits_processors"),
    **_refused("answers are always text; token ids come beside it with return_token_ids", True, names="detokenize"),
    **_refused("thinking has no limit of its own; max_tokens limits the answer", -1, names="thinking_token_budget"),
    **_refused("the gateway places KV blocks by itself", {}, names="kv_transfer_params ec_transfer_params"),
    **_refused("answers bear no watermark", False, names="watermarking"),
    **_refused("repetitions do not end an answer; use repetition_penalty", names="repetition_detection"),
    **_refused("there are no extensions that would read it", {}, names="vllm_xargs extra_args"),
    **_refused("the tokens of an answer cannot be given", [], names="trace_decode_token_ids"),
    **_refused("the weights of a service have no versions", False, names="return_weight_versions"),
    **_refused("routed experts are not told", 0, names="routed_experts_prompt_start"),
    **_refused("a stream has what is new, a body has the whole", names="output_kind"),
    **_refused("this model writes text alone", ["text"], names="modalities"),
    **_refused("this model writes text alone", names="audio"),
    **_refused("filling in the middle is not served", "", names="suffix"),
    **_refused("a template comes with the model or from CHAT_TEMPLATE, not with a request", names="chat_template"),
    **_refused("the functions of older clients are not served; use tools", [], names="functions"),
    **_refused("the functions of older clients are not served; use tools", "none", "auto", names="function_call"),
    **_refused("the length of an answer is not steered; say so in a message", "medium", names="verbosity"),
    **_refused("there is no search", names="web_search_options"),
    **_refused("answers are not moderated", names="moderation"),
    **_refused("reasoning stays in the text of the answer", True, names="include_reasoning"),
    **_refused("POST the same body to /v1/chat/completions/render", False, names="return_prompt_text"),
}
"""Refused by every endpoint that generates, unless it serves the field."""

_OF_OTHER_SERVERS = {
    **_refused("structured output is not supported yet", "", {}, names="grammar json_schema regex ebnf structural_tag"),
    **_refused("the field is called repetition_penalty", 1, names="repeat_penalty"),
    **_refused("the field is called min_tokens", 0, names="min_new_tokens"),
    **_refused("the field is called max_tokens", -1, names="max_new_tokens n_predict"),
    **_refused("the field is called temperature; 0 takes the likeliest token", True, names="do_sample"),
    **_refused("the sampling method is not served", 1, names="typical_p tfs_z num_beams"),
    **_refused(
        "the sampling method is not served",
        *(0, -1),
        names="top_a mirostat mirostat_mode dynatemp_range dry_multiplier xtc_probability top_n_sigma smoothing_factor "
        "epsilon_cutoff eta_cutoff no_repeat_ngram_size encoder_no_repeat_ngram_size",
    ),
    **_refused("the sampling method is not served", names="samplers custom_logit_processor"),
    **_refused("adapters are not served", names="lora lora_path lora_request"),
    **_refused("the field is called bad_words", [], names="banned_tokens banned_strings"),
    **_refused("send it in chat_template_kwargs", names="enable_thinking thinking reasoning"),
}
"""Fields of neither package, which clients of other servers send."""

_UNREAD = {
    **_harmless("it names the client's user or purpose", "user", "metadata", "safety_identifier", "session_id"),
    **_harmless("ids are the gateway's own; X-Request-Id comes back as it is", "request_id"),
    **_harmless("nothing is stored", "store"),
    **_harmless("all requests have one class of service; see priority", "service_tier"),
    **_harmless(
        "the prefix cache works by itself",
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "skip_reading_prefix_cache"),
    ),
    **_harmless("a guess of the answer could make it come sooner, and does not change it", "prediction"),
    **_harmless("tools are not called", "parallel_tool_calls"),
    **_harmless("structured output itself is refused", "guided_decoding_backend", "guided_whitespace_pattern"),
    **_harmless("shown special tokens are joined as the tokenizer joins them", "spaces_between_special_tokens"),
    **_harmless("events carry what is ready", "stream_interval"),
    **_harmless("only rendering tells offsets", "return_token_offsets"),
    **_harmless(
        "it is about images, audio and video, which are refused in messages",
        *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
    ),
    **_harmless("it is about the inside of a process", "skip_clone", "output_text_buffer_length"),
}

_CHAT_TEXT = _served(
    *("messages", "add_generation_prompt", "continue_final_message", "documents", "chat_template_kwargs"),
    *("tools", "tool_choice", "reasoning_effort"),
)
_OWN_BEGINNING = _refused("a chat's beginning is the template's", False, names="add_special_tokens")

CHAT: Table = {
    **_UNSERVED,
    **_OF_OTHER_SERVERS,
    **_refused("the last message is not repeated", False, names="echo"),
    **_refused("it must be 1: there is no ranking of hidden choices", 1, names="best_of"),
    **_OWN_BEGINNING,
    **_SAMPLING,
    **_CHAT_TEXT,
    **_served("max_completion_tokens", "top_logprobs"),
    **_UNREAD,
}
COMPLETIONS: Table = {
    **_UNSERVED,
    **_OF_OTHER_SERVERS,
    **_refused("documents go into a chat template", [], names="documents"),
    **_SAMPLING,
    **_served("prompt", "echo", "best_of", "add_special_tokens"),
    **_UNREAD,
}
TOKENIZE: Table = {
    **_refused("a template comes with the model or from CHAT_TEMPLATE, not with a request", names="chat_template"),
    **_served("model", "prompt", "add_special_tokens", "return_token_strs"),
    **_CHAT_TEXT,
    **_harmless("it is about images, audio and video, which are refused", "media_io_kwargs", "mm_processor_kwargs"),
}
DETOKENIZE: Table = _served("model", "tokens")
STREAM_OPTIONS: Table = {
    **_served("include_usage", "include_timing", "continuous_usage_stats"),
    **_harmless("events are padded with nothing", "include_obfuscation"),
}

TABLES: Mapping[str, Table] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": COMPLETIONS,
    "POST /tokenize": TOKENIZE,
    "POST /detokenize": DETOKENIZE,
    "stream_options": STREAM_OPTIONS,
}


def refused_of(table: Table) -> Table:
    """The refused fields of an endpoint."""
    return {name: field for name, field in table.items() if field.treatment is Treatment.REFUSED}


REFUSED_IN_CHAT = refused_of(CHAT)
REFUSED_IN_COMPLETIONS = refused_of(COMPLETIONS)
