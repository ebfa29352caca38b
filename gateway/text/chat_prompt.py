"""Messages → prompt: the exact text and token ids that a model gets. Blocking: called in worker threads.

Renders the model's own chat template, equal to transformers' `apply_chat_template` without transformers (whose import
costs seconds), and encodes the text. The template comes from the model's files and is compiled once; messages come
from clients, are data only, and their texts stay texts: control_tokens.py.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import InvalidRequestError, ModelError
from pdserve.gateway.text.tokenizer import ModelTokenizer, read_special_tokens

Message = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""What clients and templates call a message's thoughts; templates read the first, gpt-oss the second."""
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Template variables that have request fields of their own."""


@dataclass(frozen=True)
class Chat:
    """A checked conversation and how to render it."""

    messages: list[Message]
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The client's `chat_template_kwargs`, and fields that templates read."""


@dataclass(frozen=True)
class Prompt:
    """What a model continues."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class ChatPrompts:
    """The chat side of one model."""

    tokenizer: ModelTokenizer
    template: ChatTemplate | None
    """None: the model has no chat template."""

    @classmethod
    def load(cls, path: Path, template_source: str | None) -> ChatPrompts:
        """Read a model folder; `template_source` is the Jinja text of its card.

        Raises:
            ModelError: no readable tokenizer.json, or a template that does not compile.
        """
        template = ChatTemplate(template_source, read_special_tokens(path)) if template_source else None
        return cls(ModelTokenizer.load(path, template.output_literals if template else ""), template)

    def build(self, chat: Chat) -> Prompt:
        """Render and encode one conversation.

        Raises:
            InvalidRequestError: the model cannot chat, or its template refuses these messages.
        """
        try:
            return self._build(chat)
        except RecursionError:
            raise InvalidRequestError("the messages are nested too deeply", param="messages") from None

    def _build(self, chat: Chat) -> Prompt:
        template, control = self.template, self.tokenizer.control_tokens
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or start the gateway with CHAT_TEMPLATE",
                param="messages",
            )
        messages = [_fitted(message, template) for message in chat.messages]
        # Roles are from a closed set and part of the template's own tokens.
        texts = [{name: value for name, value in message.items() if name != "role"} for message in messages]
        tools, variables = chat.tools, dict(chat.variables)
        marks = control.choose_marks(texts, tools, variables)
        if marks is not None:
            texts, tools, variables = (control.mark(value, marks) for value in (texts, tools, variables))
            messages = [{"role": old["role"], **text} for old, text in zip(messages, texts, strict=True)]
        rendered = template.render(
            messages,
            tools=tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=variables,
        )
        text, token_ids = self.tokenizer.encode_chat(rendered, marks)
        return Prompt(text, token_ids)


# --- the template


class ChatTemplate:
    """One model's compiled chat template."""

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
        """The text of the prompt.

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


def _fitted(message: Message, template: ChatTemplate) -> Message:
    """The message as this template takes it: parts joined unless it knows parts, developer as system unless known."""
    content = message.get("content")
    if isinstance(content, list) and not template.takes_parts:
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    if message["role"] == "developer" and not template.knows_developer:
        message = {**message, "role": "system"}
    return message


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
