"""What chat and completions have in common in a request: sampling, limits, stops, streaming.

Checks the range of each value. Pure: reads a JSON object, knows the vocabulary's size, and no model, prompt or worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.body import INT64, Fields, as_finite
from pdserve.gateway.openai.request_fields import Table
from pdserve.models.generation_config import SamplingDefaults
from pdserve.sampling_params import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters: the gateway looks for every stop string in every piece of text."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
"""Characters; what is forbidden is looked for before every token."""
MAX_TOKENS = 2**31 - 1
MAX_CACHE_SALT_LENGTH = 256


@dataclass(frozen=True)
class StreamOptions:
    """How the answer is sent."""

    is_stream: bool = False
    has_usage: bool = False
    """A last chunk with the usage."""
    has_timing: bool = False
    """`usage.timing`: where the time went."""
    has_token_ids: bool = False
    has_running_usage: bool = False
    """Every event tells the usage of its choice so far."""


@dataclass(frozen=True)
class Truncation:
    """Which part of a prompt that is too long is kept."""

    max_tokens: int
    """-1: what leaves room for the output."""
    keeps_end: bool

    def apply(self, token_ids: list[int], max_output_tokens: int | None, limit: int) -> list[int]:
        """The part of a prompt; `limit` is of prompt and output together, without a limit the output is one token."""
        num_output_tokens = 1 if max_output_tokens is None else max_output_tokens
        num_kept = max(1, limit - num_output_tokens) if self.max_tokens == -1 else self.max_tokens
        if num_kept >= len(token_ids):
            return token_ids
        return token_ids[-num_kept:] if self.keeps_end else token_ids[:num_kept]


@dataclass(frozen=True)
class Options:
    """One request's options; prompt and choices' limits are resolved later, when the prompt's length is known."""

    n: int
    max_tokens: int | None
    """None: the client gave no limit."""
    sampling: SamplingParams
    """Its max_tokens is preliminary: see `sampling_for`."""
    stops: tuple[str, ...]
    is_stop_included: bool
    skip_special_tokens: bool
    stream: StreamOptions
    priority: int
    cache_salt: str
    bad_words: tuple[str, ...] = ()
    """Texts that are not written; the sampling parameters have their tokens."""
    truncation: Truncation | None = None
    has_token_names: bool = False
    """Log-probabilities name tokens by their ids."""
    usual_max_tokens: int | None = None
    """When the client gives no limit, the model's own; None: all that is left."""

    def sampling_for(self, num_prompt_tokens: int, limit: int) -> SamplingParams:
        """The final sampling parameters.

        Args:
            num_prompt_tokens: of this prompt.
            limit: tokens of prompt and output together that can be served.

        Raises:
            InvalidRequestError: prompt and output do not fit, or min_tokens exceeds the output's limit.
        """
        max_tokens = self.max_tokens
        if max_tokens is None:
            num_left = max(1, limit - num_prompt_tokens)
            max_tokens = num_left if self.usual_max_tokens is None else min(num_left, self.usual_max_tokens)
        if num_prompt_tokens + max_tokens > limit:
            raise InvalidRequestError(
                f"This model's maximum context length is {limit} tokens; the request has {num_prompt_tokens} prompt "
                f"tokens and asks for {max_tokens} more: shorten the prompt or lower max_tokens.",
                param="max_tokens" if num_prompt_tokens < limit else "prompt",
                code="context_length_exceeded",
            )
        if self.sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.sampling.min_tokens}, more than max_tokens, {max_tokens}",
                param="min_tokens",
                code="invalid_value",
            )
        return msgspec.structs.replace(self.sampling, max_tokens=max_tokens)


def read_options(
    fields: Fields,
    *,
    refused: Table,
    defaults: SamplingDefaults,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    draw_seed: Callable[[], int],
    has_timing_header: bool,
) -> Options:
    """Everything that chat and completions share.

    Args:
        refused: fields that the endpoint does not serve.
        defaults: where the client is silent.
        max_tokens: as the endpoint read it (each has its own names and lower bound).
        logprobs: alternatives per token, None = off, as the endpoint read it.
        has_timing_header: `X-PDServe-Timing: 1` asks for `usage.timing`.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    refuse_unserved(fields, refused)
    min_tokens = fields.integer("min_tokens", 0, 0, MAX_TOKENS)
    if max_tokens and min_tokens > max_tokens:
        raise fields.refuse("min_tokens", f"at most max_tokens, {max_tokens}")
    seed = fields.integer("seed", None, INT64.start, INT64.stop - 1)
    return Options(
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            seed=draw_seed() if seed is None else seed,
            max_tokens=1 if max_tokens is None else max_tokens,
            min_tokens=min_tokens,
            temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
            top_k=_top_k(fields, defaults.top_k, vocab_size),
            top_p=fields.number("top_p", defaults.top_p, 0.0, 1.0, is_low_open=True),
            min_p=fields.number("min_p", defaults.min_p, 0.0, 1.0),
            repetition_penalty=fields.number(
                "repetition_penalty", defaults.repetition_penalty, 0.0, float("inf"), is_low_open=True
            ),
            presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
            logit_bias=_logit_bias(fields, vocab_size),
            allowed_token_ids=_allowed_token_ids(fields, vocab_size),
            ignore_eos=fields.boolean("ignore_eos", False),
            stop_token_ids=tuple(fields.token_ids("stop_token_ids", vocab_size, max_items=MAX_STOP_TOKEN_IDS)),
            logprobs=None if logprobs is None else min(logprobs, vocab_size),
            prompt_logprobs=_prompt_logprobs(fields),
        ),
        stops=_stops(fields),
        is_stop_included=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        stream=_stream_options(fields, has_timing_header),
        priority=fields.integer("priority", 0, -(2**31), 2**31 - 1),
        cache_salt=fields.text("cache_salt", "", max_length=MAX_CACHE_SALT_LENGTH),
        bad_words=_bad_words(fields),
        truncation=read_truncation(fields),
        has_token_names=fields.boolean("return_tokens_as_token_ids", False),
        usual_max_tokens=defaults.max_tokens,
    )


def refuse_unserved(fields: Fields, refused: Table) -> None:
    """A field that would change the answer is served or refused, never ignored."""
    for name, value in fields.values.items():
        if name in refused and not refused[name].is_neutral(value):
            raise fields.unserved(name, refused[name].about)


def _top_k(fields: Fields, default: int, vocab_size: int) -> int:
    """-1 and 0 are off; more than the vocabulary is all of it, which is off too."""
    top_k = fields.integer("top_k", default, -1, MAX_TOKENS)
    return 0 if top_k < 1 or top_k >= vocab_size else top_k


def _prompt_logprobs(fields: Fields) -> int | None:
    """-1, all of the vocabulary, is more than is told of a token."""
    count = fields.integer("prompt_logprobs", None, 0, MAX_LOGPROBS)
    if count is not None and fields.boolean("stream", False):
        raise InvalidRequestError(
            "prompt_logprobs is not told in a stream; leave stream out, or ask for echo and logprobs",
            param="prompt_logprobs",
            code="invalid_value",
        )
    return count


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.object("logit_bias")
    if given is None:
        return {}
    if len(given.values) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(given.values)} entries, at most {MAX_LOGIT_BIAS} are served",
            param="logit_bias",
            code="invalid_value",
        )
    return {_bias_key(key, vocab_size): given.number(key, 0.0, -100.0, 100.0) for key in given.values}


def _bias_key(key: str, vocab_size: int) -> int:
    is_number = key.isascii() and key.isdigit() and len(key) <= 10
    if not is_number or int(key) >= vocab_size:
        raise InvalidRequestError(
            f"logit_bias keys must be token ids in [0, {vocab_size}); {key[:40]!r} is none",
            param="logit_bias",
            code="invalid_value",
        )
    return int(key)


def _allowed_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    if fields.get("allowed_token_ids") == []:
        raise fields.refuse("allowed_token_ids", "a list of at least one token id")
    return tuple(sorted(set(fields.token_ids("allowed_token_ids", vocab_size))))


def _bad_words(fields: Fields) -> tuple[str, ...]:
    expected = f"a list of up to {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_LENGTH} characters, not blanks alone"
    words = fields.items("bad_words", expected, max_items=MAX_BAD_WORDS) or []
    if not all(isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_LENGTH for word in words):
        raise fields.refuse("bad_words", expected)
    return tuple(dict.fromkeys(words))


def read_truncation(fields: Fields) -> Truncation | None:
    """Which part of its prompt a client wants; None: all of it."""
    side = fields.text("truncation_side", "left")
    if side not in ("left", "right"):
        raise fields.refuse("truncation_side", "left or right")
    max_tokens = fields.integer("truncate_prompt_tokens", None, -1, MAX_TOKENS)
    if max_tokens == 0:
        raise fields.refuse("truncate_prompt_tokens", "-1 or a whole number of at least 1")
    return None if max_tokens is None else Truncation(max_tokens, keeps_end=side == "left")


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.get("stop")
    stops = [given] if isinstance(given, str) else ([] if given is None else given)
    is_good = isinstance(stops, list) and len(stops) <= MAX_STOP_STRINGS
    if not is_good or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise fields.refuse(
            "stop", f"up to {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_LENGTH} characters"
        )
    return tuple(dict.fromkeys(stops))


def _stream_options(fields: Fields, has_timing_header: bool) -> StreamOptions:
    is_stream = fields.boolean("stream", False)
    given = fields.object("stream_options")
    if given is not None and not is_stream:
        raise InvalidRequestError("stream_options is only allowed with stream: true", param="stream_options")
    given = given or Fields({}, "stream_options")
    return StreamOptions(
        is_stream=is_stream,
        has_usage=given.boolean("include_usage", False),
        has_timing=given.boolean("include_timing", False) or has_timing_header,
        has_token_ids=fields.boolean("return_token_ids", False),
        has_running_usage=given.boolean("continuous_usage_stats", False),
    )


def check_response_format(fields: Fields) -> None:
    """Text is served, structured output not yet."""
    given = fields.object("response_format")
    if given is None:
        return
    kind: Any = given.get("type")
    if kind in ("json_object", "json_schema"):
        raise InvalidRequestError(
            f"response_format {kind} is not supported yet", param="response_format", code="not_supported"
        )
    if kind != "text":
        raise given.refuse("type", "text, json_object or json_schema")


def finite_logprob(value: float) -> float:
    """JSON knows no infinity: a token that was masked has -9999."""
    number = as_finite(value)
    return -9999.0 if number is None or number < -9999.0 else number
