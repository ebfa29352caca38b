"""`POST /v1/completions`. Step 1 of 8 of a request's way, with chat.py.

A raw text is encoded as the tokenizer does: special-token strings in it are special tokens, and the tokenizer's own
beginning (a BOS token) is added unless `add_special_tokens` is false. Token ids are taken as they are.
"""

from __future__ import annotations

from typing import Any

from pdserve.errors import InvalidRequestError
from pdserve.gateway.generation.choice_output import ChoiceOutput, Delta
from pdserve.gateway.http.fields import Fields
from pdserve.gateway.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest, read_completion_request
from pdserve.gateway.openai.envelope import Body, Envelope
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.logprobs import BytesOf, CompletionLogprobs
from pdserve.gateway.openai.reply import send_answer
from pdserve.gateway.openai.usage import usage_of

_KIND = "text_completion"


async def completions(frontend: Frontend, call: Call, fields: Fields) -> None:
    """Answer one completions request.

    Raises:
        RequestError: it is wrong, refused or failed.
    """
    frontend.check_model(fields)
    request = read_completion_request(
        fields,
        vocab_size=frontend.card.vocab_size,
        draw_seed=frontend.draw_seed,
        has_timing_header=call.has_timing,
    )
    started_s = frontend.clock()
    prompts, echoes = await frontend.in_thread(_encode, frontend, request)
    frontend.observer.tokenized(frontend.clock() - started_s)
    num_prompt_tokens = sum(map(len, prompts))
    envelope = Envelope.of(frontend, call, request.options, prompts)
    shape = CompletionShape(envelope, request, echoes, frontend.prompts.tokenizer.bytes_of)
    if request.is_prompt_only:
        await _send_prompts(call, shape, request, num_prompt_tokens)
        return
    answer = frontend.start(call, prompts, request.options, default_max_tokens=DEFAULT_MAX_TOKENS, continues=True)
    await send_answer(frontend, call, answer, shape, request.options.stream, num_prompt_tokens)


def _encode(frontend: Frontend, request: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """(token ids, text to echo) of each prompt; blocking."""
    tokenizer = frontend.prompts.tokenizer
    ids = [
        tokenizer.encode(prompt, add_special_tokens=request.adds_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in request.prompts
    ]
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in request.prompts] if request.is_echo else []
    if not all(ids):
        raise InvalidRequestError("the prompt is empty and this model has no token to begin with", param="prompt")
    return ids, texts


async def _send_prompts(call: Call, shape: CompletionShape, request: CompletionRequest, num_prompt_tokens: int) -> None:
    """Echo without generating."""
    options = request.options.stream
    usage = usage_of(None, num_prompt_tokens=num_prompt_tokens, has_timing=False)
    num_choices = len(request.prompts) * request.options.n
    call.record.num_prompt_tokens, call.record.finish_reason = num_prompt_tokens, "length"
    if not options.is_stream:
        await call.responder.json(shape.prompts_only(num_choices, usage))
        return
    for event in shape.prompts_only(num_choices, usage)["choices"]:
        call.responder.add(shape.event(event))
    if options.has_usage:
        call.responder.add(shape.usage(usage))
    await call.responder.done()


class CompletionShape:
    """Completions' events and bodies."""

    def __init__(self, envelope: Envelope, request: CompletionRequest, echoes: list[str], bytes_of: BytesOf) -> None:
        """`echoes`: the prompts' texts, empty without echo."""
        self._envelope, self._echoes, self._n = envelope, echoes, request.options.n
        self._has_logprobs = request.options.sampling.logprobs is not None
        self._has_token_ids = request.options.stream.has_token_ids
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._bytes_of = bytes_of

    def opening(self, output: ChoiceOutput) -> Body | None:
        """The prompt's text, with echo; its ids, when asked for."""
        if not self._echoes and not self._has_token_ids:
            return None
        choice = self._choice(output.index, self._echo(output.index), None)
        if self._has_token_ids:
            choice["prompt_token_ids"] = self._envelope.prompt_token_ids[output.index // self._n]
        return self.event(choice)

    def piece(self, output: ChoiceOutput, delta: Delta) -> Body:
        """New text."""
        return self.event(self._with_tokens(self._choice(output.index, delta.text, None), output, delta))

    def closing(self, output: ChoiceOutput) -> Body:
        """The finish reason."""
        return self.event(self._choice(output.index, "", output.finish_reason))

    def usage(self, usage: Body) -> Body:
        """The usage alone."""
        return self._envelope.usage_event(_KIND, usage)

    def whole(self, choices: list[tuple[ChoiceOutput, Delta]], usage: Body) -> Body:
        """The body in one piece."""
        return self._envelope.whole(_KIND, [self._whole_choice(output, delta) for output, delta in choices], usage)

    def prompts_only(self, num_choices: int, usage: Body) -> Body:
        """The body when nothing was generated."""
        choices = [self._choice(index, self._echo(index), "length") for index in range(num_choices)]
        return self._envelope.whole(_KIND, choices, usage)

    def event(self, choice: Body) -> Body:
        """One event with one choice."""
        return self._envelope.event(_KIND, [choice])

    def _whole_choice(self, output: ChoiceOutput, delta: Delta) -> Body:
        choice = self._choice(output.index, self._echo(output.index) + delta.text, output.finish_reason)
        if self._has_token_ids:
            choice["prompt_token_ids"] = self._envelope.prompt_token_ids[output.index // self._n]
        return self._with_tokens(choice, output, delta)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _with_tokens(self, choice: Body, output: ChoiceOutput, delta: Delta) -> Body:
        if self._has_logprobs:
            logprobs = self._logprobs.setdefault(output.index, CompletionLogprobs(self._bytes_of))
            choice["logprobs"] = logprobs.format(delta.entries)
        if self._has_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
