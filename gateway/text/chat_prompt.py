"""Messages → prompt: the exact text and token ids that a model gets. Blocking: called in worker threads.

Joins the chat template (text) and the tokenizer (ids), and sees to it that clients' texts stay texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.errors import InvalidRequestError
from pdserve.gateway.text.chat_template import ChatTemplate, Message
from pdserve.gateway.text.tokenizer import ModelTokenizer, read_special_tokens


@dataclass(frozen=True)
class Chat:
    """A checked conversation and how to render it."""

    messages: list[Message]
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`."""


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


def _fitted(message: Message, template: ChatTemplate) -> Message:
    """The message as this template takes it: parts joined unless it knows parts, developer as system unless known."""
    content = message.get("content")
    if isinstance(content, list) and not template.takes_parts:
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    if message["role"] == "developer" and not template.knows_developer:
        message = {**message, "role": "system"}
    return message
