"""`POST /v1/chat/completions`. Step 1 of 8 of a request's way, with completions.py.

Before: app.py routed a body here. After: dispatcher.py takes token ids and sampling parameters; then reply.py sends
what comes back in the shape that is written down here.
"""

from __future__ import annotations

from typing import Any

from pdserve.gateway.generation.choice_output import ChoiceOutput, Delta
from pdserve.gateway.http.fields import Fields
from pdserve.gateway.openai.chat_request import ChatRequest, read_chat_request
from pdserve.gateway.openai.envelope import Body, Envelope
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.logprobs import BytesOf, chat_logprobs
from pdserve.gateway.openai.reply import send_answer

_CHUNK, _WHOLE = "chat.completion.chunk", "chat.completion"


async def chat_completions(frontend: Frontend, call: Call, fields: Fields) -> None:
    """Answer one chat request.

    Raises:
        RequestError: it is wrong, refused or failed.
    """
    frontend.check_model(fields)
    request = read_chat_request(
        fields,
        vocab_size=frontend.card.vocab_size,
        draw_seed=frontend.draw_seed,
        has_timing_header=call.has_timing,
    )
    started_s = frontend.clock()
    prompt = await frontend.in_thread(frontend.prompts.build, request.chat)
    frontend.observer.tokenized(frontend.clock() - started_s)
    answer = frontend.start(call, [prompt.token_ids], request.options, default_max_tokens=None, continues=False)
    shape = ChatShape(
        Envelope.of(frontend, call, request.options, [prompt.token_ids]),
        request,
        frontend.prompts.tokenizer.bytes_of,
    )
    await send_answer(frontend, call, answer, shape, request.options.stream, len(prompt.token_ids))


class ChatShape:
    """Chat's events and bodies."""

    def __init__(self, envelope: Envelope, request: ChatRequest, bytes_of: BytesOf) -> None:
        self._envelope, self._bytes_of = envelope, bytes_of
        self._has_logprobs = request.options.sampling.logprobs is not None
        self._has_token_ids = request.options.stream.has_token_ids

    def opening(self, output: ChoiceOutput) -> Body:
        """The role, in the first event alone."""
        event = self._event(output, {"role": "assistant", "content": ""})
        if self._has_token_ids:
            event["prompt_token_ids"] = self._envelope.prompt_token_ids[0]
        return event

    def piece(self, output: ChoiceOutput, delta: Delta) -> Body:
        """New text."""
        return self._event(output, {"content": delta.text}, delta)

    def closing(self, output: ChoiceOutput) -> Body:
        """The finish reason."""
        return self._event(output, {})

    def usage(self, usage: Body) -> Body:
        """The usage alone."""
        return self._envelope.usage_event(_CHUNK, usage)

    def whole(self, choices: list[tuple[ChoiceOutput, Delta]], usage: Body) -> Body:
        """The body in one piece."""
        body = self._envelope.whole(_WHOLE, [self._choice(output, delta) for output, delta in choices], usage)
        if self._has_token_ids:
            body["prompt_token_ids"] = self._envelope.prompt_token_ids[0]
        return body

    def _event(self, output: ChoiceOutput, content: Body, delta: Delta | None = None) -> Body:
        choice: dict[str, Any] = {"index": output.index, "delta": content, "logprobs": None, "finish_reason": None}
        if delta is None and not content:
            choice["finish_reason"] = output.finish_reason
        return self._envelope.event(_CHUNK, [self._with_tokens(choice, delta)])

    def _choice(self, output: ChoiceOutput, delta: Delta) -> Body:
        choice = {
            "index": output.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        return self._with_tokens(choice, delta)

    def _with_tokens(self, choice: Body, delta: Delta | None) -> Body:
        if delta is not None and self._has_logprobs:
            choice["logprobs"] = chat_logprobs(delta.entries, self._bytes_of)
        if delta is not None and self._has_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
