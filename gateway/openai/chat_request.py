"""The body of a chat request: messages, tools and how to render them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.fields import Fields
from pdserve.gateway.openai.options import MAX_LOGPROBS, MAX_TOKENS, Options, check_response_format, read_options
from pdserve.gateway.text.chat_prompt import Chat
from pdserve.gateway.text.chat_template import RESERVED_NAMES, Message

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""A role becomes part of the template's own tokens, so it is never a client's free text."""
MAX_MESSAGES = 10_000


@dataclass(frozen=True)
class ChatRequest:
    """A checked chat request."""

    chat: Chat
    options: Options


def read_chat_request(
    fields: Fields, *, vocab_size: int, draw_seed: Callable[[], int], has_timing_header: bool
) -> ChatRequest:
    """Check a body.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    check_response_format(fields)
    return ChatRequest(
        chat=read_chat(fields),
        options=read_options(
            fields,
            vocab_size=vocab_size,
            max_tokens=_max_tokens(fields),
            logprobs=_logprobs(fields),
            draw_seed=draw_seed,
            has_timing_header=has_timing_header,
        ),
    )


def read_chat(fields: Fields) -> Chat:
    """The conversation alone: what /tokenize and render need too."""
    fields.forbid("chat_template", "a template comes with the model or from CHAT_TEMPLATE, not with a request")
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
    if content is None and role == "assistant":
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
    """A call as templates take it: its arguments as an object, where clients send its JSON text."""
    function = fields.object("function")
    if function is None or not isinstance(function.get("name"), str):
        raise fields.refuse("function", "an object with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments or "{}")
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            decoded = arguments
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {**fields.values, "function": {**function.values, "arguments": arguments}}


def _check_tools(fields: Fields) -> None:
    fields.forbid("functions", "the functions of older clients are not served; use tools")
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


def _variables(fields: Fields) -> dict[str, Any]:
    given = fields.object("chat_template_kwargs")
    variables = {} if given is None else dict(given.values)
    effort = fields.text("reasoning_effort", max_length=32)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    reserved = next((name for name in variables if name in RESERVED_NAMES), None)
    if reserved is not None:
        raise InvalidRequestError(
            f"chat_template_kwargs.{reserved} has a field of its own in the request", param="chat_template_kwargs"
        )
    return variables


def _max_tokens(fields: Fields) -> int | None:
    """max_completion_tokens is the newer name and wins."""
    older = fields.integer("max_tokens", None, 1, MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", None, 1, MAX_TOKENS)
    return older if newer is None else newer


def _logprobs(fields: Fields) -> int | None:
    top_logprobs = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    is_wanted = fields.boolean("logprobs", False)
    if top_logprobs is not None and not is_wanted:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    return (top_logprobs or 0) if is_wanted else None
