"""`POST /v1/chat/completions`: its body, and the events and bodies of its answer. Step 1 of 8 of a request's way.

Before: endpoint.py read a JSON object. After: reply.py hands token ids and sampling parameters to the dispatcher, and
sends what comes back in the shape that is written down here. completions.py is the same step for raw texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pdserve.errors import InvalidRequestError
from pdserve.gateway.generation.answer import ChoiceOutput, Delta
from pdserve.gateway.http.body import Fields
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.logprobs import BytesOf, chat_logprobs, prompt_logprobs
from pdserve.gateway.openai.options import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    Options,
    check_response_format,
    read_options,
    refuse_unserved,
)
from pdserve.gateway.openai.reply import Body, Envelope, prepare, send_answer, start
from pdserve.gateway.openai.request_fields import REFUSED_IN_CHAT
from pdserve.gateway.text.chat_prompt import RESERVED_NAMES, Chat, Message
from pdserve.models.generation_config import USUAL, SamplingDefaults

_CHUNK, _WHOLE = "chat.completion.chunk", "chat.completion"

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""A role becomes part of the template's own tokens, so it is never a client's free text."""
MAX_MESSAGES = 10_000


async def chat_completions(frontend: Frontend, call: Call, fields: Fields) -> None:
    """Answer one chat request.

    Raises:
        RequestError: it is wrong, refused or failed.
    """
    chat = read_chat(fields)
    options = read_chat_options(
        fields,
        defaults=frontend.card.sampling_defaults,
        vocab_size=frontend.card.vocab_size,
        draw_seed=frontend.draw_seed,
        has_timing_header=call.has_timing,
    )
    started_s, loop = frontend.clock(), asyncio.get_running_loop()
    prompts, options = await loop.run_in_executor(frontend.executor, _encode, frontend, chat, options)
    frontend.observer.tokenized(frontend.clock() - started_s)
    answer = start(frontend, call, prompts, options, continues=False)
    envelope = Envelope.of(frontend, call, options, prompts)
    shape = ChatShape(envelope, options, frontend.prompts.tokenizer.bytes_of)
    await send_answer(frontend, call, answer, shape, options.stream, len(prompts[0]))


def _encode(frontend: Frontend, chat: Chat, options: Options) -> tuple[list[list[int]], Options]:
    """(token ids of the one prompt, complete options); blocking."""
    prompt = frontend.prompts.build(chat)
    return prepare(frontend, [prompt.token_ids], options, "messages")


# --- the body


def read_chat_options(
    fields: Fields,
    *,
    vocab_size: int,
    draw_seed: Callable[[], int],
    has_timing_header: bool,
    defaults: SamplingDefaults = USUAL,
) -> Options:
    """Everything of a chat's body but the conversation; arguments as for `read_options`.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    check_response_format(fields)
    return read_options(
        fields,
        refused=REFUSED_IN_CHAT,
        defaults=defaults,
        vocab_size=vocab_size,
        max_tokens=read_max_tokens(fields),
        logprobs=_logprobs(fields),
        draw_seed=draw_seed,
        has_timing_header=has_timing_header,
    )


def read_chat(fields: Fields) -> Chat:
    """The conversation alone: what /tokenize and render need too."""
    refuse_unserved(fields, REFUSED_IN_CHAT)
    messages = fields.items("messages", f"a list of 1 to {MAX_MESSAGES} messages", max_items=MAX_MESSAGES)
    if not messages:
        raise fields.refuse("messages", f"a list of 1 to {MAX_MESSAGES} messages")
    _check_tools(fields)
    continues = fields.boolean("continue_final_message", False)
    generates = fields.boolean("add_generation_prompt", not continues)
    if continues and generates:
        raise InvalidRequestError(
            "continue_final_message continues the last message, add_generation_prompt begins a new one: choose one",
            param="continue_final_message",
        )
    return Chat(
        messages=[_message(Fields.of(message, f"messages[{n}]")) for n, message in enumerate(messages)],
        add_generation_prompt=generates,
        continue_final_message=continues,
        documents=_documents(fields),
        variables=_variables(fields),
    )


def _message(fields: Fields) -> Message:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.refuse("role", f"one of {', '.join(sorted(ROLES))}")
    message = dict(fields.values)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking"):
        fields.text(name)
    message["content"] = _content(fields, role)
    calls = fields.items("tool_calls", "a list of tool calls")
    if calls is not None:
        path = fields.param("tool_calls")
        message["tool_calls"] = [_tool_call(Fields.of(call, f"{path}[{n}]")) for n, call in enumerate(calls)]
    return message


def _content(fields: Fields, role: str) -> str | list[Message] | None:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if content in (None, []) and role == "assistant":
        return None
    if not isinstance(content, list) or not content:
        raise fields.refuse("content", "a string or a list of parts")
    path = fields.param("content")
    return [_part(Fields.of(part, f"{path}[{n}]")) for n, part in enumerate(content)]


def _part(fields: Fields) -> Message:
    kind = fields.get("type")
    if kind == "refusal":
        return {"type": "text", "text": fields.text("refusal", "")}
    if kind != "text":
        raise fields.refuse("type", "text: this model reads no other kind of content")
    if not isinstance(fields.get("text"), str):
        raise fields.refuse("text", "a string")
    return {"type": "text", "text": fields.get("text")}


def _tool_call(fields: Fields) -> Message:
    """A call with its arguments as JSON text (what clients send) or as an object."""
    function = fields.object("function")
    if function is None or not isinstance(function.get("name"), str):
        raise fields.refuse("function", "an object with name and arguments")
    if not isinstance(function.get("arguments"), str | dict | None):
        raise function.refuse("arguments", "a JSON text or an object")
    return dict(fields.values)


def _check_tools(fields: Fields) -> None:
    tools = fields.items("tools", "a list of tools")
    choice = fields.get("tool_choice")
    if tools is None:
        if choice is not None:
            raise InvalidRequestError("tool_choice is only allowed together with tools", param="tool_choice")
        return
    if not tools:
        raise fields.refuse("tools", "a list of at least one tool")
    if choice != "none":
        raise InvalidRequestError(
            'tools are not supported yet; leave them out, or send tool_choice "none"',
            param="tools",
            code="not_supported",
        )


def _documents(fields: Fields) -> list[Any] | None:
    """What the template reads beside the messages; null and an empty list are none."""
    path = fields.param("documents")
    documents = fields.items("documents", "a list of documents") or None
    return documents and [dict(Fields.of(item, f"{path}[{n}]").values) for n, item in enumerate(documents)]


def _variables(fields: Fields) -> dict[str, Any]:
    given = fields.object("chat_template_kwargs")
    variables = {} if given is None else dict(given.values)
    effort = fields.text("reasoning_effort", max_length=32)
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        raise InvalidRequestError(
            "reasoning_effort is in the request and, with another value, in chat_template_kwargs: choose one",
            param="chat_template_kwargs",
        )
    reserved = next((name for name in variables if name in RESERVED_NAMES), None)
    if reserved is not None:
        raise InvalidRequestError(
            f"chat_template_kwargs.{reserved} has a field of its own in the request", param="chat_template_kwargs"
        )
    return variables


def read_max_tokens(fields: Fields) -> int | None:
    """The limit of the answer: max_completion_tokens is the newer name and wins."""
    older = fields.integer("max_tokens", None, 1, MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", None, 1, MAX_TOKENS)
    return older if newer is None else newer


def _logprobs(fields: Fields) -> int | None:
    top_logprobs = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    is_wanted = fields.boolean("logprobs", False)
    if top_logprobs is not None and not is_wanted:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    return (top_logprobs or 0) if is_wanted else None


# --- the answer


class ChatShape:
    """The events and bodies of a chat answer."""

    def __init__(self, envelope: Envelope, options: Options, bytes_of: BytesOf) -> None:
        self._envelope, self._bytes_of = envelope, bytes_of
        self._event_head = envelope.event_head(_CHUNK)
        self._has_logprobs = options.sampling.logprobs is not None
        self._num_prompt_logprobs = options.sampling.prompt_logprobs
        self._has_token_ids, self._has_token_names = options.stream.has_token_ids, options.has_token_names

    def opening(self, output: ChoiceOutput) -> Body:
        """The role, in the first event alone."""
        event = self._event(output, {"role": "assistant", "content": ""})
        if self._has_token_ids:
            event["prompt_token_ids"] = self._envelope.prompt_token_ids[0]
        return event

    def piece(self, output: ChoiceOutput, delta: Delta) -> Body:
        """An event with new text."""
        return self._event(output, {"content": delta.text}, delta)

    def closing(self, output: ChoiceOutput) -> Body:
        """The last event of a choice: its finish reason."""
        return self._event(output, {})

    def usage(self, usage: Body) -> Body:
        """The event with the usage alone."""
        return self._envelope.whole(_CHUNK, [], usage)

    def whole(self, choices: list[tuple[ChoiceOutput, Delta]], usage: Body) -> Body:
        """The body in one piece."""
        body = self._envelope.whole(_WHOLE, [self._choice(output, delta) for output, delta in choices], usage)
        if self._has_token_ids:
            body["prompt_token_ids"] = self._envelope.prompt_token_ids[0]
        if self._num_prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                self._envelope.prompt_token_ids[0],
                choices[0][0].prompt_logprobs,
                self._num_prompt_logprobs,
                self._bytes_of,
            )
        return body

    def _event(self, output: ChoiceOutput, content: Body, delta: Delta | None = None) -> Body:
        choice: dict[str, Any] = {"index": output.index, "delta": content, "logprobs": None, "finish_reason": None}
        if delta is None and not content:
            choice["finish_reason"] = output.finish_reason
        return {**self._event_head, "choices": [self._with_tokens(choice, delta)]}

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
            choice["logprobs"] = chat_logprobs(delta.entries, self._bytes_of, has_token_names=self._has_token_names)
        if delta is not None and self._has_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
