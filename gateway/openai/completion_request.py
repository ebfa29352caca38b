"""The body of a completions request: prompts as texts or token ids. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.fields import Fields, is_integer, is_token_id
from pdserve.gateway.openai.options import MAX_LOGPROBS, MAX_TOKENS, Options, check_response_format, read_options

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_TOTAL_CHOICES = 1024


@dataclass(frozen=True)
class CompletionRequest:
    """A checked completions request: prompts × n choices."""

    prompts: list[str | list[int]]
    options: Options
    is_echo: bool
    """The text begins with the prompt."""
    adds_special_tokens: bool
    """As the tokenizer does for a raw text: usually a beginning-of-sequence token. Special tokens are read."""

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is generated: echo with max_tokens 0."""
        return self.options.max_tokens == 0


def read_completion_request(
    fields: Fields, *, vocab_size: int, draw_seed: Callable[[], int], has_timing_header: bool
) -> CompletionRequest:
    """Check a body.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    check_response_format(fields)
    is_echo = fields.boolean("echo", False)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    if is_echo and logprobs is not None:
        raise InvalidRequestError(
            "echo with logprobs is not supported yet: log-probabilities are given for generated tokens only",
            param="logprobs",
            code="not_supported",
        )
    if fields.text("suffix"):
        fields.forbid("suffix", "filling in the middle is not served")
    options = read_options(
        fields,
        vocab_size=vocab_size,
        max_tokens=fields.integer("max_tokens", None, 0 if is_echo else 1, MAX_TOKENS),
        logprobs=logprobs,
        draw_seed=draw_seed,
        has_timing_header=has_timing_header,
    )
    if fields.integer("best_of", options.n, 1, MAX_TOKENS) != options.n:
        raise fields.refuse("best_of", "equal to n: there is no ranking of hidden choices")
    prompts = _prompts(fields, vocab_size)
    if len(prompts) * options.n > MAX_TOTAL_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {options.n} make more than {MAX_TOTAL_CHOICES} choices", param="n"
        )
    return CompletionRequest(prompts, options, is_echo, fields.boolean("add_special_tokens", True))


def _prompts(fields: Fields, vocab_size: int) -> list[str | list[int]]:
    """One or several prompts, each a text or a list of token ids."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.refuse("prompt", "a string, a list of token ids, or a list of these")
    if all(is_integer(item) for item in prompt):
        return [fields.token_ids("prompt", vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"{len(prompt)} prompts, at most {MAX_PROMPTS} are served at once", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    for item in prompt:
        if not isinstance(item, list) or not item or not all(is_token_id(token, vocab_size) for token in item):
            raise fields.refuse("prompt", f"texts only, or non-empty lists of token ids in [0, {vocab_size}) only")
    return list(prompt)
