"""The prompts of verification: every residue of the block size, one token to long, CJK, emoji and code. Pure.

Equal arguments make equal prompts, so that a mismatch can be repeated. Token prompts are real text cut at an
exact number of tokens, wherever that falls.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_SENTENCES = {
    "english": (
        "The river had been rising since the early morning.",
        "No one in the harbour could say where the ship came from.",
        "A good proof is short, but it is never in a hurry.",
        "She counted the lamps along the bridge and found one missing.",
        "Tomorrow the market opens an hour later than usual.",
    ),
    "code": (
        "def area(width: float, height: float) -> float:\n    return width * height\n",
        "for i in range(len(rows)):\n\ttotal += rows[i][2] ** 2\n",
        "if (p == NULL || p->next != &head[0]) { free(p); return -1; }\n",
        'SELECT name, COUNT(*) FROM orders WHERE paid = "no" GROUP BY name;\n',
        'console.log(`${user.id}: ${items.map(x => x * 0x1f).join(", ")}`);\n',
    ),
    "cjk": (
        "河水从清晨开始上涨。",
        "港口里没有人知道那艘船从哪里来。",
        "橋の灯りを数えると、一つ足りなかった。",
        "내일 시장은 평소보다 한 시간 늦게 열린다.",
        "好的证明很短，但从不匆忙。",
    ),
    "emoji": (
        "🚲🌧️ then ☕️, finally 🏠! ",
        "👩‍🚀👨‍👩‍👧‍👦 went to 🏝️ with 🧳🧳. ",
        "🇫🇷 vs 🇯🇵: 2️⃣–1️⃣ 🎉 ",
        "نهر طويل 🐫 ليل هادئ. ",
        "Ünïcödé 𝒾𝓃 𝓂𝒶𝓃𝓎 ﬁnė shapes… ",
    ),
}
KINDS = tuple(_SENTENCES)
_CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer packs into one on average, so that a text is long enough at once."""


@dataclass(frozen=True, slots=True)
class VerifyPrompt:
    """One prompt: token ids for /v1/completions, or a user message for /v1/chat/completions."""

    name: str
    token_ids: tuple[int, ...]
    """The prompt as ids; a chat's are what the reference's own chat template makes of the message."""
    message: str | None = None


def lengths(num_prompts: int, max_tokens: int, block_size: int) -> list[int]:
    """Prompt lengths from 1 to `max_tokens`, more short ones than long ones, going through all residues.

    With at least `2 * block_size` prompts every residue of `block_size` appears.
    """
    assert max_tokens >= 1, max_tokens
    result = [1]
    for i in range(1, num_prompts):
        base = round(max_tokens ** (i / max(1, num_prompts - 1)))
        length = base - base % block_size + i % block_size
        result.append(max(1, length if length <= max_tokens else length - block_size))
    return result[:num_prompts]


def text_of(kind: str, num_characters: int, draw: random.Random) -> str:
    """Sentences of one kind in random order, at least so long."""
    parts: list[str] = []
    size = 0
    while size < num_characters:
        parts.append(draw.choice(_SENTENCES[kind]))
        size += len(parts[-1])
    return " ".join(parts)


def token_prompts(
    encode: Callable[[str], list[int]], num_prompts: int, max_tokens: int, block_size: int, seed: int = 0
) -> list[VerifyPrompt]:
    """Prompts for completions, each with its share of kinds of text and of lengths.

    Args:
        encode: text to ids, without special tokens.
        num_prompts: how many.
        max_tokens: length of the longest.
        block_size: tokens of one KV block.
        seed: equal seeds give equal texts.
    """
    prompts = []
    for i, length in enumerate(lengths(num_prompts, max_tokens, block_size)):
        kind = KINDS[i % len(KINDS)]
        draw = random.Random(f"{seed}/{i}")
        # A number in front keeps prompts of a kind from sharing their first block.
        token_ids = encode(f"{i}: " + text_of(kind, length * _CHARACTERS_PER_TOKEN, draw))
        if length < 4:
            token_ids = token_ids[3:]
        assert len(token_ids) >= length, (kind, length, len(token_ids))
        prompts.append(VerifyPrompt(f"{kind}-{i} ({length} tokens)", tuple(token_ids[:length])))
    return prompts


def chat_prompts(template: Callable[[str], list[int]], num_prompts: int, seed: int = 0) -> list[VerifyPrompt]:
    """Prompts for chats; `template` gives the ids of a user message as the model's chat template has it."""
    prompts = []
    for i in range(num_prompts):
        kind = KINDS[i % len(KINDS)]
        message = text_of(kind, 20 + 60 * (i // len(KINDS)), random.Random(f"chat/{seed}/{i}"))
        prompts.append(VerifyPrompt(f"chat-{kind}-{i}", tuple(template(message)), message))
    return prompts
