"""One conversation through one template, by the gateway and by transformers."""

from __future__ import annotations

from typing import Any

from chat_tokenizers import SPECIAL_TOKENS, byte_level
from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.gateway.text.chat_prompt import Chat, ChatPrompts
from pdserve.gateway.text.tokenizer import ModelTokenizer
from pdserve.templating.chat_template import ChatTemplate

Messages = list[dict[str, Any]]


def render(source: str, messages: Messages, **options: Any) -> str:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    prompts = ChatPrompts(ModelTokenizer(byte_level(), SPECIAL_TOKENS, template.literals), template)
    return prompts.build(Chat(messages, **options)).text


def reference(source: str, messages: Messages, **options: Any) -> str:
    """What transformers' own renderer makes of the same values."""
    variables = {"add_generation_prompt": True, **SPECIAL_TOKENS, **options}
    return render_jinja_template([messages], chat_template=source, **variables)[0][0]


def parts(*texts: str) -> Messages:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, name: str = "run_shell") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


USER, TOOL = {"role": "user", "content": "run ls"}, {"role": "tool", "tool_call_id": "call_1", "content": "file1.txt"}
