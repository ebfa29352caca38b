"""Renders a model's own chat template: messages in, the exact prompt text out.

Equal to transformers' `apply_chat_template`, without transformers (whose import costs seconds). The template
comes from the model's files and is compiled once; messages come from clients and are data only.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import InvalidRequestError, ModelError

Message = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""What clients and templates call a message's thoughts; templates read the first, gpt-oss the second."""
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Template variables that have request fields of their own."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables such as bos_token and eos_token.

        Raises:
            ModelError: the source is not a Jinja template.
        """
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.output_literals = _output_literals(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        self.knows_developer = "developer" in source
        self.takes_parts = self._probe()

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: the template refuses these messages, or has no place to continue the last one.
        """
        messages = [_normalized(message) for message in messages]
        tag = f"continue-here-{secrets.token_hex(8)} "
        if continue_final_message:
            messages[-1] = _with_tag(messages[-1], tag)
        text = self._render(messages, tools, add_generation_prompt, variables or {})
        return _cut_at_tag(text, tag) if continue_final_message else text

    def _render(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        names = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused: {error}", param="messages") from error
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages ({type(error).__name__}: {error})", param="messages"
            ) from error

    def _probe(self) -> bool:
        """Whether a list of text parts renders as the same text does."""
        text, user = "probe-of-text-parts", {"role": "user"}
        try:
            as_parts = self.render([{**user, "content": [{"type": "text", "text": text}]}])
            return as_parts == self.render([{**user, "content": text}])
        except InvalidRequestError:
            return False


def _normalized(message: Message) -> Message:
    """Absent rather than null, and thoughts under the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_tag(message: Message, tag: str) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + tag}
    parts = [dict(part) for part in content or ()]
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            part["text"] += tag
            return {**message, "content": parts}
    raise InvalidRequestError("continue_final_message needs a last message with text", param="continue_final_message")


def _cut_at_tag(text: str, tag: str) -> str:
    """Everything before the tag; a template that trims contents has also trimmed the end of the continued one."""
    position = text.rfind(tag.strip())
    if position < 0:
        raise InvalidRequestError(
            "this model's chat template drops the last message, so it cannot be continued",
            param="continue_final_message",
        )
    is_trimmed = text[position : position + len(tag)] != tag
    return text[:position].rstrip() if is_trimmed else text[:position]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter it does not escape HTML, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _output_literals(tree: jinja2.nodes.Template) -> str:
    """Literal texts that the template writes, NUL between them; those that it only looks for in contents are left out.

    A template that splits contents at `</think>` takes that token from messages, so it is no mark of its own.
    """
    readers = (jinja2.nodes.Compare, jinja2.nodes.Call, jinja2.nodes.Filter, jinja2.nodes.Test)
    looked_for = {text for node in tree.find_all(readers) for text in _strings_read_by(node)}
    written = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    written |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(written - looked_for))


def _strings_read_by(node: jinja2.nodes.Node) -> Iterator[str]:
    """String constants that are operands of a comparison or arguments of a call, not of what is compared or called."""
    operands: list[jinja2.nodes.Node] = []
    match node:
        case jinja2.nodes.Compare():
            operands = [node.expr, *[operand.expr for operand in node.ops]]
        case jinja2.nodes.Call() | jinja2.nodes.Filter() | jinja2.nodes.Test():
            operands = [*node.args]
    for operand in operands:
        if isinstance(operand, jinja2.nodes.Const) and isinstance(operand.value, str):
            yield operand.value
