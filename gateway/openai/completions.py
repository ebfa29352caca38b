"""`POST /v1/completions`: its body, and the events and bodies of its answer. Step 1 of 8 of a request's way.

A raw text is encoded as the tokenizer does: special-token strings in it are special tokens, and the tokenizer's own
beginning (a BOS token) is added unless `add_special_tokens` is false. Token ids are taken as they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.errors import InvalidRequestError
from pdserve.gateway.generation.answer import ChoiceOutput, Delta
from pdserve.gateway.http.body import Fields, is_integer, is_token_id
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.logprobs import CompletionLogprobs, prompt_entries, prompt_logprobs
from pdserve.gateway.openai.options import MAX_LOGPROBS, MAX_TOKENS, Options, check_response_format, read_options
from pdserve.gateway.openai.reply import Body, Envelope, prepare, send_answer, start, token_counts, usage_of
from pdserve.gateway.openai.request_fields import REFUSED_IN_COMPLETIONS
from pdserve.gateway.text.tokenizer import Detokenizer, ModelTokenizer
from pdserve.models.generation_config import USUAL, SamplingDefaults
from pdserve.reasons import Ending, FinishReason

_KIND = "text_completion"

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_TOTAL_CHOICES = 1024


async def completions(frontend: Frontend, call: Call, fields: Fields) -> None:
    """Answer one completions request.

    Raises:
        RequestError: it is wrong, refused or failed.
    """
    request = read_completion_request(
        fields,
        defaults=frontend.card.sampling_defaults,
        vocab_size=frontend.card.vocab_size,
        draw_seed=frontend.draw_seed,
        has_timing_header=call.has_timing,
    )
    started_s, loop = frontend.clock(), asyncio.get_running_loop()
    prompts, echoes, options = await loop.run_in_executor(frontend.executor, _encode, frontend, request)
    frontend.observer.tokenized(frontend.clock() - started_s)
    num_prompt_tokens = sum(map(len, prompts))
    envelope = Envelope.of(frontend, call, options, prompts)
    shape = CompletionShape(envelope, request, echoes, frontend.prompts.tokenizer)
    if request.needs_no_worker:
        await _send_prompts(call, shape, request, num_prompt_tokens)
        return
    answer = start(frontend, call, prompts, options, continues=True)
    await send_answer(frontend, call, answer, shape, options.stream, num_prompt_tokens)


def _encode(frontend: Frontend, request: CompletionRequest) -> tuple[list[list[int]], list[str], Options]:
    """(token ids, text to echo) of each prompt, complete options; blocking."""
    tokenizer = frontend.prompts.tokenizer
    ids = [
        tokenizer.encode(prompt, add_special_tokens=request.adds_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in request.prompts
    ]
    if not all(ids):
        raise InvalidRequestError("the prompt is empty and this model has no token to begin with", param="prompt")
    kept, options = prepare(frontend, ids, request.options, "prompt")
    texts = [
        prompt if isinstance(prompt, str) and len(kept_ids) == len(whole_ids) else tokenizer.decode(kept_ids)
        for prompt, whole_ids, kept_ids in zip(request.prompts if request.is_echo else [], ids, kept, strict=False)
    ]
    return kept, texts, options


async def _send_prompts(call: Call, shape: CompletionShape, request: CompletionRequest, num_prompt_tokens: int) -> None:
    """Echo the prompts without generating."""
    options = request.options.stream
    usage = usage_of(None, num_prompt_tokens=num_prompt_tokens, has_timing=False)
    num_choices = len(request.prompts) * request.options.n
    call.record.num_prompt_tokens, call.record.ending = num_prompt_tokens, Ending.LENGTH
    if not options.is_stream:
        await call.responder.json(shape.prompts_only(num_choices, usage))
        return
    events = [shape.event(choice) for choice in shape.prompts_only(num_choices, usage)["choices"]]
    if options.has_running_usage:
        for index, event in enumerate(events):
            event["usage"] = token_counts(shape.num_prompt_tokens(index), 0)
    await call.responder.done([*events, shape.usage(usage)] if options.has_usage else events)


# --- the body


@dataclass(frozen=True)
class CompletionRequest:
    """A checked completions request: prompts × n choices."""

    prompts: list[str | list[int]]
    options: Options
    is_echo: bool
    """The text begins with the prompt."""
    adds_special_tokens: bool
    """Whether a raw text gets what the tokenizer adds: usually a beginning-of-sequence token."""
    num_prompt_logprobs: int | None
    """Alternatives of each prompt token that `prompt_logprobs` shows; None: it is not shown."""

    @property
    def needs_no_worker(self) -> bool:
        """Whether nothing is generated or scored: echo with max_tokens 0."""
        return self.options.max_tokens == 0 and self.options.sampling.prompt_logprobs is None


def read_completion_request(
    fields: Fields,
    *,
    vocab_size: int,
    draw_seed: Callable[[], int],
    has_timing_header: bool,
    defaults: SamplingDefaults = USUAL,
) -> CompletionRequest:
    """Check a completions body; arguments as for `read_options`.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    check_response_format(fields)
    is_echo = fields.boolean("echo", False)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    options = read_options(
        fields,
        refused=REFUSED_IN_COMPLETIONS,
        defaults=defaults,
        vocab_size=vocab_size,
        max_tokens=fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 0 if is_echo else 1, MAX_TOKENS),
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
    num_shown = options.sampling.prompt_logprobs
    if is_echo and logprobs is not None:
        options = _scoring(options, max(logprobs, num_shown or 0))
        num_shown = logprobs if num_shown is None else num_shown
    return CompletionRequest(prompts, options, is_echo, fields.boolean("add_special_tokens", True), num_shown)


def _scoring(options: Options, count: int) -> Options:
    """Ask for the prompt's log-probabilities, too."""
    sampling = msgspec.structs.replace(options.sampling, prompt_logprobs=count)
    return dataclasses.replace(options, sampling=sampling)


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


# --- the answer


class CompletionShape:
    """The events and bodies of a completions answer."""

    def __init__(
        self, envelope: Envelope, request: CompletionRequest, echoes: list[str], tokenizer: ModelTokenizer
    ) -> None:
        """`echoes`: the prompts' texts, empty without echo."""
        self._envelope, self._echoes, self._n = envelope, echoes, request.options.n
        self._event_head = envelope.event_head(_KIND)
        self._num_logprobs = request.options.sampling.logprobs
        self._num_prompt_logprobs = request.num_prompt_logprobs
        self._has_token_ids = request.options.stream.has_token_ids
        self._has_token_names = request.options.has_token_names
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._tokenizer = tokenizer

    def opening(self, output: ChoiceOutput) -> Body | None:
        """The prompt's text, with echo; its ids, when asked for."""
        if not self._echoes and not self._has_token_ids:
            return None
        choice = self._choice(output.index, self._echo(output.index), None)
        if self._has_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids(output)
        if self._echoes and self._num_logprobs is not None:
            choice["logprobs"] = self._echoed_logprobs(output, self._num_logprobs)
        return self.event(choice)

    def piece(self, output: ChoiceOutput, delta: Delta) -> Body:
        """An event with new text."""
        return self.event(self._with_tokens(self._choice(output.index, delta.text, None), output, delta))

    def closing(self, output: ChoiceOutput) -> Body:
        """The last event of a choice: its finish reason."""
        return self.event(self._choice(output.index, "", output.finish_reason))

    def usage(self, usage: Body) -> Body:
        """The event with the usage alone."""
        return self._envelope.whole(_KIND, [], usage)

    def whole(self, choices: list[tuple[ChoiceOutput, Delta]], usage: Body) -> Body:
        """The body in one piece."""
        return self._envelope.whole(_KIND, [self._whole_choice(output, delta) for output, delta in choices], usage)

    def prompts_only(self, num_choices: int, usage: Body) -> Body:
        """The body when nothing was generated."""
        choices = [self._choice(index, self._echo(index), FinishReason.LENGTH) for index in range(num_choices)]
        return self._envelope.whole(_KIND, choices, usage)

    def event(self, choice: Body) -> Body:
        """One event with one choice."""
        return {**self._event_head, "choices": [choice]}

    def _whole_choice(self, output: ChoiceOutput, delta: Delta) -> Body:
        choice = self._choice(output.index, self._echo(output.index) + delta.text, output.finish_reason)
        if self._has_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids(output)
        if self._num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._prompt_ids(output), output.prompt_logprobs, self._num_prompt_logprobs, self._tokenizer.bytes_of
            )
        echoed = None
        if self._echoes and self._num_logprobs is not None:
            echoed = self._echoed_logprobs(output, self._num_logprobs)
        choice = self._with_tokens(choice, output, delta)
        if echoed is not None:
            choice["logprobs"] = {name: echoed[name] + values for name, values in choice["logprobs"].items()}
        return choice

    def num_prompt_tokens(self, index: int) -> int:
        """Tokens of the prompt of a choice."""
        return len(self._envelope.prompt_token_ids[index // self._n])

    def _prompt_ids(self, output: ChoiceOutput) -> list[int]:
        return self._envelope.prompt_token_ids[output.index // self._n]

    def _echoed_logprobs(self, output: ChoiceOutput, num_top: int) -> Body:
        """The `logprobs` object of the prompt's tokens; those of generated ones go on behind it."""
        tokenizer, logprobs = self._tokenizer, self._logprobs_of(output)
        detokenizer = Detokenizer(
            tokenizer.backend_tokenizer, skip_special_tokens=False, token_bytes=tokenizer.token_bytes
        )
        entries = prompt_entries(self._prompt_ids(output), output.prompt_logprobs, detokenizer, num_top)
        return logprobs.format_echo(self._echo(output.index), entries)

    def _logprobs_of(self, output: ChoiceOutput) -> CompletionLogprobs:
        if output.index not in self._logprobs:
            logprobs = CompletionLogprobs(self._tokenizer.bytes_of, has_token_names=self._has_token_names)
            self._logprobs[output.index] = logprobs
        return self._logprobs[output.index]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _with_tokens(self, choice: Body, output: ChoiceOutput, delta: Delta) -> Body:
        if self._num_logprobs is not None:
            choice["logprobs"] = self._logprobs_of(output).format(delta.entries)
        if self._has_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
