"""Messages → prompt: the exact text and token ids that a model gets. Blocking: called in worker threads.

Renders the model's own chat template, equal to transformers' `apply_chat_template` without transformers (whose import
costs seconds), and encodes the text. Messages come from clients and are data only: the template sees their true
strings, none of which becomes a control token, and no system, user or tool text is lost on the way.

Templates read a message's content as a string, or as a list of parts, or in one form here and the other there. Which
one shows in what they write: a text that is missing in the prompt is offered in the other form.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter, deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from pdserve.errors import InvalidRequestError
from pdserve.gateway.text.tokenizer import ModelTokenizer
from pdserve.gateway.text.tokenizer_files import read_special_tokens
from pdserve.log import get_logger
from pdserve.templating.chat_template import ChatTemplate, RefusedByTemplateError
from pdserve.templating.traced_text import JsonObject, NullText, join, message_source, sources_of, trace

logger = get_logger(__name__)

Message = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""What clients and templates call a message's thoughts."""
_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", *_REASONING_NAMES})
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Template variables that have request fields of their own."""
_MAX_RENDERINGS = 16
_MAX_QUOTED = 200
_ONE_SOURCE = re.compile(r"(.)\1*", re.DOTALL)


@dataclass(frozen=True)
class Chat:
    """A checked conversation and how to render it."""

    messages: list[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
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
        return cls(ModelTokenizer.load(path, template.literals if template else ""), template)

    def build(self, chat: Chat) -> Prompt:
        """Render and encode one conversation.

        Raises:
            InvalidRequestError: the model cannot chat, its template refuses these messages, or leaves a text out.
        """
        if self.template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or start the gateway with CHAT_TEMPLATE",
                param="messages",
            )
        own = next((name for name in chat.variables if name in self.template.own_names), None)
        if own is not None:
            raise InvalidRequestError(
                f"chat_template_kwargs.{own} is a name of the template's own, not one to set",
                param="chat_template_kwargs",
            )
        try:
            rendered = _Rendering(self.template, chat).text()
        except RecursionError:
            raise InvalidRequestError("the messages are nested too deeply", param="messages") from None
        return Prompt(str.__str__(rendered), self.tokenizer.encode_chat(rendered))


# --- one conversation on its way through a template


_NULL = "a content that is null is null where a template asks, not an empty text"
_REASONING = "thoughts also stand under the names that templates read, not only under the client's"
_ARGUMENTS = "arguments of tool calls are objects, not JSON texts"


class _Content(Enum):
    """How a message's content is shown: as a string, as the parts that it came in, or as one part."""

    STRING = 0
    PARTS = 1
    ONE_PART = 2

    @property
    def next(self) -> _Content:
        """What to try instead."""
        return {_Content.PARTS: _Content.STRING, _Content.STRING: _Content.ONE_PART}.get(self, _Content.PARTS)


@dataclass(frozen=True)
class _Form:
    """One way to show a conversation to a template."""

    contents: tuple[_Content, ...]
    """How each message's content is shown."""
    without: frozenset[str] = frozenset()
    """Which of the aids above the template does not get this time."""

    def others(self, roles: list[str], aids: list[str]) -> list[_Form]:
        """What to try when a template fails on this form: what such templates are known to want.

        `aids`: those that make a difference for this conversation.
        """
        string, parts = _Content.STRING, _Content.PARTS
        choices = [
            (string,) * len(roles),
            (parts,) * len(roles),
            tuple(parts if role == "user" else string for role in roles),
            tuple(string if role == "user" else parts for role in roles),
            (_Content.ONE_PART,) * len(roles),
        ]
        return [
            *(replace(self, contents=choice) for choice in choices),
            *(replace(self, without=self.without | {aid}) for aid in aids),
        ]

    def changed(self, messages: Container[int]) -> _Form:
        """The same with the contents of these messages in another form."""
        changed = (shown.next if n in messages else shown for n, shown in enumerate(self.contents))
        return replace(self, contents=tuple(changed))


class _FormRefusedError(Exception):
    """The template does not render one form; `error` is the client's if there is no other."""

    def __init__(self, error: InvalidRequestError, index: int) -> None:
        """`index`: of the message at which the template failed."""
        super().__init__(error.message)
        self.error, self.index = error, index


class _ShownMessage(dict[str, Any]):
    """A message that notes when it is read: a template fails at the last one that it read."""

    def __init__(self, fields: Message, index: int, last_read: list[int]) -> None:
        """`last_read`: the place for the index, shared by all messages of one rendering."""
        super().__init__(fields)
        self._index, self._last_read = index, last_read

    def __getitem__(self, name: str) -> Any:
        self._last_read[0] = self._index
        return super().__getitem__(name)


class _Rendering:
    """One conversation and one template."""

    def __init__(self, template: ChatTemplate, chat: Chat) -> None:
        self._template, self._chat = template, chat
        self._messages = [_cleaned(message, template) for message in chat.messages]
        self._roles: list[str] = [message["role"] for message in self._messages]
        self._sizes = [_num_visible("".join(_texts(message))) for message in self._messages]
        matters = {
            _NULL: any(message["content"] is None for message in self._messages),
            _REASONING: any(name in message for message in self._messages for name in _REASONING_NAMES),
            _ARGUMENTS: any("tool_calls" in message for message in self._messages),
        }
        self._aids = [aid for aid, does_matter in matters.items() if does_matter]
        self._variables = trace(dict(chat.variables))
        self._tools, self._documents = trace(chat.tools), trace(chat.documents)

    def text(self) -> str:
        """The prompt, traced, in the first form of which the template loses nothing.

        Raises:
            InvalidRequestError: there is none.
        """
        sent = (isinstance(message["content"], list) for message in self._messages)
        first = _Form(tuple(_Content.PARTS if is_list else _Content.STRING for is_list in sent))
        forms, seen = deque([first]), {first}
        best: tuple[list[int], str] | None = None
        failures: list[_FormRefusedError] = []
        for _ in range(_MAX_RENDERINGS):
            form = forms.popleft()
            try:
                rendered = self._render(form)
            except _FormRefusedError as refused:
                failures.append(refused)
                others = form.others(self._roles, self._aids)
            else:
                lost = self._lost(rendered)
                if best is None or len(lost) < len(best[0]):
                    best = (lost, rendered)
                others = [form.changed(lost)] if lost else []
            forms.extend(other for other in others if other not in seen)
            seen.update(others)
            if not forms or (best is not None and not best[0]):
                break
        if best is None:
            raise max(failures, key=lambda failure: failure.index).error
        self._check(best[0])
        return best[1]

    def _render(self, form: _Form) -> str:
        """The prompt in one form."""
        last_read = [-1]
        messages = [self._shown(index, form) for index in range(len(self._messages))]
        tag = f"continue-here-{secrets.token_hex(8)} "
        if self._chat.continue_final_message:
            messages[-1] = _with_tag(messages[-1], tag)
        variables = {
            **self._variables,
            "messages": [_ShownMessage(message, index, last_read) for index, message in enumerate(messages)],
            "tools": self._tools,
            "documents": self._documents,
            "add_generation_prompt": self._chat.add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except RecursionError:
            raise
        except RefusedByTemplateError as error:
            shown, words = self._name(last_read[0]), str(error)[:_MAX_QUOTED]
            raise self._refused(last_read[0], f"this model's chat template refuses {shown}: {words}") from error
        except Exception as error:
            logger.debug("the chat template failed", exc_info=True)
            shown = self._name(last_read[0])
            raise self._refused(last_read[0], f"this model's chat template cannot render {shown}") from error
        return _cut_at_tag(text, tag) if self._chat.continue_final_message else text

    def _name(self, index: int) -> str:
        return f"messages[{index}] (role {self._roles[index]})" if index >= 0 else "these messages"

    def _refused(self, index: int, sentence: str) -> _FormRefusedError:
        param = f"messages[{index}]" if index >= 0 else "messages"
        return _FormRefusedError(InvalidRequestError(sentence, param=param), index)

    # --- what the template gets

    def _shown(self, index: int, form: _Form) -> Message:
        """A message in this form, its strings traced."""
        message, texts = self._messages[index], _texts(self._messages[index])
        shown: Message = {name if name in _FIELDS else trace(name): trace(item) for name, item in message.items()}
        shown["role"] = message["role"]  # from a closed set, and part of the template's own tokens
        traced = [trace(text, message_source(index)) for text in texts]
        if message["content"] is None and _NULL not in form.without:
            shown["content"] = NullText()
        elif form.contents[index] is _Content.PARTS:
            shown["content"] = [{"type": "text", "text": text} for text in traced]
        else:
            text = join("\n", traced)
            is_string = form.contents[index] is _Content.STRING
            shown["content"] = text if is_string else [{"type": "text", "text": text}]
        if "tool_calls" in message:
            shown["tool_calls"] = [_call(call, _ARGUMENTS not in form.without) for call in message["tool_calls"]]
        return shown if _REASONING in form.without else self._with_reasoning(shown)

    def _with_reasoning(self, message: Message) -> Message:
        reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
        if reasoning is None:
            return message
        names = {"thinking"} | ({"reasoning"} & self._template.names_read)
        return {**dict.fromkeys(names, reasoning), **message, "reasoning_content": reasoning}

    # --- what became of it

    def _lost(self, rendered: str) -> list[int]:
        """Indices of the messages with a text that is not in the prompt; an assistant's may be there in part."""
        num_shown: Counter[str] = Counter()
        text = str.__str__(rendered)
        for run in _ONE_SOURCE.finditer(sources_of(rendered)):
            num_shown[run[1]] += _num_visible(text[run.start() : run.end()])
        wanted = (
            min(size, 1) if role == "assistant" else size for role, size in zip(self._roles, self._sizes, strict=True)
        )
        return [index for index, size in enumerate(wanted) if num_shown[message_source(index)] < size]

    def _check(self, lost: list[int]) -> None:
        """Refuse a prompt without a text that a model must get; history may be left out, as templates do."""
        index = next((index for index in lost if self._roles[index] != "assistant"), None)
        if index is not None:
            raise InvalidRequestError(
                f"{self._name(index)}: this model's chat template leaves its text out of the "
                "prompt; send it in a message of another role",
                param=f"messages[{index}]",
            )


def _cleaned(message: Message, template: ChatTemplate) -> Message:
    """Absent rather than null or empty, but for the content; developer as system unless the template knows it."""
    cleaned = {name: value for name, value in message.items() if value is not None}
    if not cleaned.get("tool_calls", True):
        del cleaned["tool_calls"]
    content = message.get("content")
    cleaned["content"] = "" if content == [] else content
    if message["role"] == "developer" and "developer" not in template.names_read:
        cleaned["role"] = "system"
    return cleaned


def _texts(message: Message) -> list[str]:
    content = message["content"]
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def _call(call: Message, parses_arguments: bool) -> Message:
    """A tool call whose arguments are an object, for templates that print them also the JSON text of it."""
    shown: Message = trace(call)
    function = call.get("function", {})
    arguments: Any = function.get("arguments")
    members: Any
    if isinstance(arguments, dict):
        text, members = json.dumps(arguments, ensure_ascii=False), arguments
    elif isinstance(arguments, str):
        text, members = arguments or "{}", _parsed(arguments or "{}")
    else:
        return shown
    is_object = isinstance(members, dict) and parses_arguments
    shown["function"]["arguments"] = JsonObject(trace(members), trace(text)) if is_object else trace(text)
    return shown


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _num_visible(text: str) -> int:
    """Characters that no template trims."""
    return len("".join(text.split()))


def _with_tag(message: Message, tag: str) -> Message:
    content = message["content"]
    if isinstance(content, list) and content:
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + tag}]}
    if isinstance(content, str) and not isinstance(content, NullText):
        return {**message, "content": content + tag}
    raise InvalidRequestError("continue_final_message needs a last message with text", param="continue_final_message")


def _cut_at_tag(text: str, tag: str) -> str:
    """Everything before the tag; a template that trims contents has also trimmed the end of the continued one."""
    position = text.rfind(tag.strip())
    if position < 0:
        raise _FormRefusedError(
            InvalidRequestError(
                "this model's chat template drops the last message, so it cannot be continued",
                param="continue_final_message",
            ),
            index=-1,
        )
    is_trimmed = text[position : position + len(tag)] != tag
    return text[:position].rstrip() if is_trimmed else text[:position]
