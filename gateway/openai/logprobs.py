"""Log-probabilities as clients get them, for chat and for completions. Pure.

Alternatives are shown as single tokens; the sampled token as the text that it brought, so that joined tokens are
the text. Nothing infinite leaves: a masked token has -9999.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdserve.gateway.generation.answer import TokenEntry
from pdserve.gateway.openai.options import finite_logprob

BytesOf = Callable[[int], bytes]
"""A token by itself."""


def chat_logprobs(entries: list[TokenEntry], bytes_of: BytesOf) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {"content": [_chat_entry(entry, bytes_of) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenEntry, bytes_of: BytesOf) -> dict[str, Any]:
    logprobs = entry.logprobs
    return {
        "token": entry.text,
        "logprob": finite_logprob(logprobs.logprob),
        "bytes": list(_bytes_shown(entry, bytes_of)),
        "top_logprobs": [
            {
                "token": _shown(token_id, entry, bytes_of),
                "logprob": finite_logprob(logprob),
                "bytes": list(bytes_of(token_id)),
            }
            for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        ],
    }


def _bytes_shown(entry: TokenEntry, bytes_of: BytesOf) -> bytes:
    """What a token brought: its own bytes, without the blanks that a decoder drops where a text begins."""
    if entry.is_hidden:
        return b""
    own, text = bytes_of(entry.token_id), entry.text.encode()
    return text if own.lstrip(b" ") == text.lstrip(b" ") else own


@dataclass(slots=True)
class CompletionLogprobs:
    """The `logprobs` object of a completions choice, whose offsets count on over the pieces of a stream."""

    bytes_of: BytesOf
    offset: int = 0
    """Characters of text before the next token."""

    def format(self, entries: list[TokenEntry]) -> dict[str, Any]:
        """The object for these tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self.offset)
            self.offset += len(entry.text)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [finite_logprob(entry.logprobs.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenEntry) -> dict[str, float]:
        """Text → log-probability; of two tokens with equal text the likelier one, and always the sampled one."""
        logprobs = entry.logprobs
        best = {entry.text: finite_logprob(logprobs.logprob)}
        for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
            best.setdefault(_shown(token_id, entry, self.bytes_of), finite_logprob(logprob))
        return best


def _shown(token_id: int, entry: TokenEntry, bytes_of: BytesOf) -> str:
    return entry.text if token_id == entry.token_id else bytes_of(token_id).decode("utf-8", "replace")
