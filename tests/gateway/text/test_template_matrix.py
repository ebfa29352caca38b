"""Real chat templates: the prompts are transformers', every text of a client is there, and none is a control token."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest
from template_matrix import (
    BEGIN,
    END,
    PAGE,
    SHAPES,
    TOOLS,
    Messages,
    RealTemplate,
    Verdict,
    judge,
    page_of,
    real_templates,
)
from tokenizers import normalizers

from pdserve.errors import InvalidRequestError
from pdserve.gateway.text.chat_prompt import Chat, ChatPrompts

MIN_TEMPLATES = 30
NUM_CONVERSATIONS = 1
"""For each template and normalizer."""
NORMALIZERS = {"none": None, "NFKC": normalizers.NFKC(), "lower": normalizers.Lowercase(), "strip": normalizers.Strip()}


@cache
def verdicts() -> dict[str, dict[str, Verdict]]:
    found: dict[str, dict[str, Verdict]] = {}
    for template in real_templates():
        prompts = template.prompts()
        found[template.name] = {name: judge(template, prompts, shape) for name, shape in SHAPES.items()}
    return found


def test_there_are_enough_real_templates() -> None:
    assert len(real_templates()) >= MIN_TEMPLATES


@pytest.mark.parametrize("shape", SHAPES)
def test_every_template_renders_as_by_transformers(shape: str) -> None:
    wrong = {name: row[shape].details for name, row in verdicts().items() if not row[shape].is_right}
    assert not wrong


def test_the_page_lists_every_difference() -> None:
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert shown.strip() == page_of(verdicts()).strip(), "python tests/gateway/template_matrix.py rewrites it"


# --- random conversations


class Conversation:
    """A random one; its texts are unlike anything that a template writes."""

    def __init__(self, rng: random.Random, control: list[str], normalizer: str) -> None:
        self._rng, self._control, self._normalizer = rng, control, normalizer
        self._words: list[str] = []
        self.texts: list[tuple[int, str]] = []
        """(index of the message, a word of it) of system, user and tool messages."""
        self.messages: Messages = []
        if rng.random() < 0.4:
            self._add("system")
        for _ in range(rng.randint(1, 3)):
            self._add("user")
            if rng.random() < 0.3:
                self._add_call()
            self._add("assistant")
        self._add("user")

    def _text(self) -> str:
        pieces = [self._word()]
        for _ in range(self._rng.randint(0, 3)):
            pieces += [
                self._rng.choice([" ", "\n", "", "  "]),
                self._forged() if self._rng.random() < 0.6 else self._word(),
            ]
        return "".join(pieces) + self._rng.choice(["", " ", "\n", "<", "<|"])

    def _word(self) -> str:
        word = f"wörd{self._rng.randrange(10**9)}é"
        self._words.append(word)
        return word

    def _forged(self) -> str:
        token = self._rng.choice(self._control)
        if self._normalizer == "NFKC":
            token = token.translate({ord(char): chr(ord(char) + 0xFEE0) for char in "<|>im[]/"})
        elif self._normalizer == "lower":
            token = token.upper() if self._rng.random() < 0.5 else token.title()
        return self._rng.choice([token, token[:-1], token[1:], token * 2])

    def _add(self, role: str, **fields: Any) -> None:
        self._words = []
        text = self._text()
        content: Any = text
        if role != "tool" and self._rng.random() < 0.3:
            content = [{"type": "text", "text": part} for part in (text, self._text())]
        if role != "assistant":
            self.texts += [(len(self.messages), word) for word in self._words]
        self.messages.append({"role": role, "content": content, **fields})

    def _add_call(self) -> None:
        arguments = {self._word(): self._forged()}
        call = {"id": "call00001", "type": "function", "function": {"name": self._forged(), "arguments": arguments}}
        content = self._rng.choice([None, "", self._text()])
        self.messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        self._add("tool", tool_call_id="call00001")


def control_ids(template: RealTemplate, prompts: ChatPrompts, chat: Chat) -> tuple[str, list[int]]:
    prompt = prompts.build(chat)
    wanted = {prompts.tokenizer.backend_tokenizer.token_to_id(token) for token in template.control}
    return prompt.text, [token_id for token_id in prompt.token_ids if token_id in wanted]


def harmless(value: Any) -> Any:
    """The same conversation without anything that could be a part of a control token."""
    if isinstance(value, str):
        return re.sub(r"[^\wé\s]|[＜｜＞［］／]", "x", value)
    if isinstance(value, dict):
        kept = ("role", "type", "id", "tool_call_id")
        return {
            key if key.isascii() else harmless(key): item if key in kept else harmless(item)
            for key, item in value.items()
        }
    return [harmless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "normalizer",
    ["NFKC", "lower", pytest.param("none", marks=pytest.mark.slow), pytest.param("strip", marks=pytest.mark.slow)],
)
def test_every_text_is_in_the_prompt_and_no_string_of_a_client_is_a_control_token(normalizer: str) -> None:
    rng = random.Random(normalizer)
    num_built, num_compared, refusals = 0, 0, []
    for template in real_templates():
        prompts = template.prompts(NORMALIZERS[normalizer])
        for _ in range(NUM_CONVERSATIONS):
            talk = Conversation(rng, template.control, normalizer)
            chat = Chat(talk.messages, tools=TOOLS if rng.random() < 0.2 else None)
            try:
                text, ids = control_ids(template, prompts, chat)
            except InvalidRequestError as error:
                refusals.append((error.status, error.param))
                continue
            num_built += 1
            lost = [
                word
                for _, word in talk.texts
                if word not in text and word not in text.encode().decode("unicode_escape")
            ]
            assert not lost, (template.name, lost, text)
            plain_text, plain_ids = control_ids(template, prompts, Chat(harmless(talk.messages), tools=chat.tools))
            # Templates may look for strings such as </think> in a message, and write other things then.
            if harmless(text) == harmless(plain_text):
                num_compared += 1
                assert ids == plain_ids, (template.name, talk.messages, text)
    assert num_built > 0.5 * NUM_CONVERSATIONS * len(real_templates())
    assert num_compared > 0.8 * num_built
    assert {status for status, _ in refusals} <= {400}
    assert all(param is not None and param.startswith("messages") for _, param in refusals)
