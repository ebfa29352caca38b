"""Submits a checked request, and sends its answer in the shape of one endpoint.

Before: chat.py or completions.py made token ids and options of a body. After: dispatch/dispatcher.py takes the
`GenerationRequest`; http/sse.py writes what comes back. Knows neither chat nor completions.
Order of a stream, per choice: opening, pieces, closing; then the usage if asked for, then `[DONE]`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from pdserve.errors import InvalidRequestError
from pdserve.gateway.generation.answer import Answer, ChoiceOutput, Delta, PromptOutput
from pdserve.gateway.generation.request import GenerationRequest
from pdserve.gateway.http.sse import Responder, SlowClientError
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.options import Options, StreamOptions
from pdserve.gateway.text.forbidden_tokens import bad_word_sequences, unknown_token
from pdserve.gateway.text.stop_strings import StopMatcher
from pdserve.gateway.text.tokenizer import Detokenizer
from pdserve.ids import RequestId
from pdserve.reasons import CancelReason, Ending

MAX_PROMPT_LOGPROBS = 2**21
"""Log-probabilities of prompt tokens in one answer; each takes some 300 bytes until it is sent."""

Body = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Envelope:
    """The fields around `choices`, in all events and bodies of one answer."""

    head: Body
    options: StreamOptions
    prompt_token_ids: list[list[int]]

    @classmethod
    def of(cls, frontend: Frontend, call: Call, options: Options, prompts: list[list[int]]) -> Envelope:
        """The envelope of one request."""
        head = {
            "id": call.request_id,
            "object": "",
            "created": int(time.time()),
            "model": call.model,
            "system_fingerprint": f"pdserve-{frontend.card.fingerprint[:12]}",
        }
        return cls(head, options.stream, prompts)

    def event_head(self, kind: str) -> Body:
        """All of an event but its choices; with include_usage each carries a null until the last."""
        head = {**self.head, "object": kind}
        return {**head, "usage": None} if self.options.has_usage else head

    def whole(self, kind: str, choices: list[Body], usage: Body) -> Body:
        """A body in one piece, or the last event, which has no choices."""
        return {**self.head, "object": kind, "choices": choices, "usage": usage}


class Shape(Protocol):
    """How one endpoint writes choices."""

    def opening(self, output: ChoiceOutput) -> Body | None:
        """The event before a choice's first piece, if there is one."""

    def piece(self, output: ChoiceOutput, delta: Delta) -> Body:
        """An event with new text."""

    def closing(self, output: ChoiceOutput) -> Body:
        """The event with a choice's finish reason."""

    def usage(self, usage: Body) -> Body:
        """The last event, without choices."""

    def whole(self, choices: list[tuple[ChoiceOutput, Delta]], usage: Body) -> Body:
        """The body of an answer in one piece."""


def token_counts(num_prompt_tokens: int, num_output_tokens: int) -> Body:
    """The three numbers of a usage."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def usage_of(answer: Answer | None, *, num_prompt_tokens: int, has_timing: bool) -> Body:
    """Tokens of one request; without an answer nothing was generated. Several prompts share the first one's timing."""
    usage = token_counts(num_prompt_tokens, answer.num_output_tokens if answer else 0)
    usage["prompt_tokens_details"] = {"cached_tokens": answer.num_cached_tokens if answer else 0}
    if has_timing and answer:
        usage["timing"] = answer.generations[0].waterfall.as_timing()
    return usage


# --- submitting


def max_total_tokens(frontend: Frontend) -> int:
    """Tokens of prompt and output together that can be served now."""
    return min(frontend.card.max_model_len, frontend.dispatcher.max_total_tokens or frontend.card.max_model_len)


def prepare(
    frontend: Frontend, prompts: Sequence[list[int]], options: Options, param: str
) -> tuple[list[list[int]], Options]:
    """Prompts as they are sent to the model, and options with what only the tokenizer knows; blocking.

    Raises:
        InvalidRequestError: a text has no token that the model knows; `param` is the field that brought the prompts.
    """
    tokenizer, vocab_size = frontend.prompts.tokenizer, frontend.card.vocab_size
    kept = list(prompts)
    if options.truncation is not None:
        limit = max_total_tokens(frontend)
        kept = [options.truncation.apply(token_ids, options.max_tokens, limit) for token_ids in prompts]
    for token_ids in kept:
        if token_ids and max(token_ids) >= vocab_size:
            raise unknown_token(tokenizer, token_ids, vocab_size, param)
    if options.bad_words:
        sequences = bad_word_sequences(options.bad_words, tokenizer, vocab_size)
        sampling = msgspec.structs.replace(options.sampling, bad_words=sequences)
        options = dataclasses.replace(options, sampling=sampling)
    return kept, options


def start(
    frontend: Frontend,
    call: Call,
    prompts: Sequence[list[int]],
    options: Options,
    *,
    continues: bool,
) -> Answer:
    """Submit one generation per prompt; with `continues` the output goes on where the prompt's text ended.

    Raises:
        RequestError: a prompt is empty or too long, or the dispatcher refuses.
    """
    if not all(prompts):
        raise InvalidRequestError("the prompt is empty and this model has no token to begin with", param="prompt")
    _check_scores(prompts, options)
    limit = max_total_tokens(frontend)
    eos_ids = frozenset[int]() if options.sampling.ignore_eos else frontend.card.eos_token_ids
    terminal_ids = eos_ids | set(options.sampling.stop_token_ids)
    requests = [
        GenerationRequest(
            request_id=call.request_id if len(prompts) == 1 else RequestId(f"{call.request_id}-{number}"),
            prompt_token_ids=token_ids,
            n=options.n,
            sampling=options.sampling_for(len(token_ids), limit),
            deadline_s=call.received_s + frontend.limits.request_deadline_s,
            received_s=call.received_s,
            terminal_ids=terminal_ids,
            priority=options.priority,
            cache_salt=options.cache_salt,
            pinned_prefill=call.pinned_prefill,
            pinned_decode=call.pinned_decode,
        )
        for number, token_ids in enumerate(prompts)
    ]
    call.record.num_prompt_tokens = sum(map(len, prompts))
    generations = []
    try:
        for request in requests:
            frontend.observer.offered(len(request.prompt_token_ids))
            generations.append(frontend.dispatcher.submit(request))
    except BaseException:
        for generation in generations:
            generation.cancel(CancelReason.CLIENT)
        raise
    call.record.waterfall = generations[0].waterfall
    outputs = [_output(frontend, index, options, terminal_ids, continues) for index in range(len(requests) * options.n)]
    return Answer(generations, outputs, clock=frontend.clock, on_tokens=frontend.observer.tokens_came)


def _check_scores(prompts: Sequence[list[int]], options: Options) -> None:
    """Refuse an answer that the log-probabilities of prompts would make larger than memory should hold."""
    count = options.sampling.prompt_logprobs
    if count is None:
        return
    num_numbers = sum(map(len, prompts)) * options.n * (1 + count)
    if num_numbers > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{sum(map(len, prompts))} prompt tokens, {1 + count} log-probabilities of each and n = {options.n} make "
            f"{num_numbers} numbers, at most {MAX_PROMPT_LOGPROBS} are told at once; send fewer prompts, ask for less",
            param="prompt_logprobs",
            code="invalid_value",
        )


def _output(
    frontend: Frontend, index: int, options: Options, terminal_ids: frozenset[int], continues: bool
) -> ChoiceOutput:
    kind = PromptOutput if options.max_tokens == 0 else ChoiceOutput
    tokenizer, has_stops = frontend.prompts.tokenizer, bool(options.stops or options.is_stop_included)
    return kind(
        index,
        Detokenizer(
            tokenizer.backend_tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            continues=continues,
            token_bytes=tokenizer.token_bytes,
        ),
        stops=StopMatcher(options.stops, options.is_stop_included) if has_stops else None,
        terminal_ids=terminal_ids,
        hidden_ids=tokenizer.special_ids if options.skip_special_tokens else frozenset(),
        has_logprobs=options.sampling.logprobs is not None,
        min_tokens=options.sampling.min_tokens,
    )


# --- sending


async def send_answer(
    frontend: Frontend, call: Call, answer: Answer, shape: Shape, options: StreamOptions, num_prompt_tokens: int
) -> None:
    """Send everything; whatever ends this early cancels the answer at once, everywhere.

    Raises:
        RequestError: the request failed.
        SlowClientError: the client does not read.
    """

    def usage() -> Body:
        return usage_of(answer, num_prompt_tokens=num_prompt_tokens, has_timing=options.has_timing)

    record, responder = call.record, call.responder
    record.ending = Ending.CANCELLED
    try:
        if options.is_stream:
            await _stream(frontend, responder, answer, shape, options)
            has_usage = options.has_usage or options.has_timing
            await responder.done([shape.usage(usage())] if has_usage else [])
        else:
            while await answer.advance():
                pass
            choices = [(output, output.take()) for output in answer.outputs]
            await responder.json(await _shaped(frontend, answer.outputs, partial(shape.whole, choices, usage())))
        record.ending = Ending(answer.outputs[0].finish_reason or Ending.ERROR)
    except SlowClientError:
        answer.cancel(CancelReason.SLOW_CLIENT)
        raise
    finally:
        record.num_output_tokens, record.token_waits_s = answer.num_output_tokens, answer.token_waits_s
        answer.cancel(CancelReason.CLIENT)


async def _stream(
    frontend: Frontend, responder: Responder, answer: Answer, shape: Shape, options: StreamOptions
) -> None:
    """Send the events of all choices as they grow, and comments while they do not."""
    opened: set[int] = set()
    while True:
        try:
            async with asyncio.timeout(frontend.limits.sse_keepalive_s):
                outputs = await answer.advance()
        except TimeoutError:
            await responder.keep_alive()
            continue
        if not outputs:
            return
        is_first = not opened
        write = partial(_events, answer, outputs, shape, options, opened)
        is_opening = len(opened) < len(answer.outputs)
        await responder.events(await _shaped(frontend, outputs, write) if is_opening else write())
        if is_first:
            for generation in answer.generations:
                generation.waterfall.note_first_write(frontend.clock())


async def _shaped(frontend: Frontend, outputs: Sequence[ChoiceOutput], work: Callable[[], T]) -> T:
    """What `work` makes of these choices; in a thread when it writes down log-probabilities of whole prompts."""
    if any(output.prompt_logprobs for output in outputs):
        return await asyncio.get_running_loop().run_in_executor(frontend.executor, work)
    return work()


def _events(
    answer: Answer, outputs: list[ChoiceOutput], shape: Shape, options: StreamOptions, opened: set[int]
) -> list[Body]:
    """What these choices have to say; each event with the usage of its choice so far, if asked for."""
    if not options.has_running_usage:
        return [event for output in outputs for event in _events_of(output, shape, options, opened)]
    told: list[Body] = []
    for output in outputs:
        num_prompt_tokens, is_opening = answer.num_prompt_tokens_of(output), output.index not in opened
        events = _events_of(output, shape, options, opened)
        for event in events:
            has_tokens = not is_opening or event is not events[0]
            event["usage"] = token_counts(num_prompt_tokens, output.num_tokens if has_tokens else 0)
        told += events
    return told


def _events_of(output: ChoiceOutput, shape: Shape, options: StreamOptions, opened: set[int]) -> list[Body]:
    """What one choice has to say; tokens without text wait for the next ones that have some."""
    events: list[Body | None] = []
    if output.index not in opened:
        opened.add(output.index)
        events.append(shape.opening(output))
    is_finished, has_token_ids = output.finish_reason is not None, options.has_token_ids
    if output.delta.text or has_token_ids or is_finished:
        delta = output.take()
        if delta.text or delta.entries or (has_token_ids and delta.token_ids):
            events.append(shape.piece(output, delta))
    if is_finished:
        events.append(shape.closing(output))
    return [event for event in events if event is not None]
