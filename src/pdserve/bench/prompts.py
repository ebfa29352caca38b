"""Makes prompts of an exact length, each different from its first token on, so that no prefix cache can help.

Token prompts (completions) are drawn from ids that the server itself produced for ordinary text. Text prompts
(chat) are words, cut and padded until the server's own count fits. Prompts are made before anything is measured.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

CountTokens = Callable[[str], Awaitable[int | None]]
"""Number of prompt tokens that the server makes of a user message; None when it does not tell."""

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_TOKENS_PER_WORD = 2.0
"""First guess; only used until the server has counted once."""
_MAX_FITTING_ROUNDS = 12
_MAX_PROMPTS = 2**24
"""So many prompts differ in their first tokens; with a usual vocabulary that is the first two."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to send."""

    content: list[int] | str
    """What a completion sends."""
    text: str
    """What a chat sends as the user's message."""
    num_tokens: int
    num_output_tokens: int


def alphabet_text() -> str:
    """Ordinary text with many different tokens; its ids are what token prompts are drawn from."""
    words = [first + second for first in _SYLLABLES for second in _SYLLABLES[::7]]
    return " ".join([string.ascii_letters, string.digits, *string.ascii_letters, *string.digits, *words])


class TokenPrompts:
    """Prompts as token ids: exact by construction.

    Args:
        token_ids: ordinary ids of the model's vocabulary, no control tokens.
        seed: equal seeds make equal prompts, in the same order.
    """

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._ids = sorted(set(token_ids))
        assert len(self._ids) >= 2, f"{len(self._ids)} different token ids are too few for different prompts"
        self._draw = random.Random(seed)
        self._draw.shuffle(self._ids)
        self._num_made = 0
        self._num_digits = math.ceil(math.log(_MAX_PROMPTS, len(self._ids)))

    def make(self, num_tokens: int, num_output_tokens: int) -> Prompt:
        """The next prompt; it begins with its number, token ids being the digits, the fastest one first."""
        digits: list[int] = []
        rest = self._num_made
        for _ in range(self._num_digits):
            rest, digit = divmod(rest, len(self._ids))
            digits.append(self._ids[digit])
        self._num_made += 1
        filler = self._draw.choices(self._ids, k=max(0, num_tokens - len(digits)))
        content = (digits + filler)[: max(1, num_tokens)]
        return Prompt(content, "", len(content), num_output_tokens)


class TextPrompts:
    """Prompts as text, of the wanted length by the server's count, or by estimate where it does not count."""

    def __init__(self, count_tokens: CountTokens, seed: int) -> None:
        self._count_tokens = count_tokens
        self._draw = random.Random(seed)
        self._tokens_per_word = _TOKENS_PER_WORD

    async def make(self, num_tokens: int, num_output_tokens: int) -> Prompt:
        """The next prompt, as near to `num_tokens` as text allows; never empty."""
        words = [self._word() for _ in range(max(1, round(num_tokens / self._tokens_per_word)))]
        best, best_count = " ".join(words), num_tokens
        distance: int | None = None
        for _ in range(_MAX_FITTING_ROUNDS):
            text = " ".join(words)
            count = await self._count_tokens(text)
            if count is None:
                break
            if distance is None or abs(count - num_tokens) < distance:
                best, best_count, distance = text, count, abs(count - num_tokens)
            if distance == 0 or (count > num_tokens and len(words) == 1):
                break
            words = self._fit(words, count, num_tokens)
        return Prompt(best, best, best_count, num_output_tokens)

    def _fit(self, words: list[str], count: int, wanted: int) -> list[str]:
        self._tokens_per_word = max(1.0, count / len(words))
        if count > wanted:
            num_dropped = max(1, int((count - wanted) / self._tokens_per_word))
            return words[: max(1, len(words) - num_dropped)]
        num_words = int((wanted - count) / self._tokens_per_word)
        return words + ([self._word() for _ in range(num_words)] or [self._draw.choice(string.ascii_lowercase)])

    def _word(self) -> str:
        return "".join(self._draw.choices(_SYLLABLES, k=3))
