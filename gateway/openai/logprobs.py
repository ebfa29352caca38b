"""Log-probabilities as clients get them, for chat and for completions. Pure.

Alternatives are shown as single tokens; the sampled token as the text that it brought, so that joined tokens are
the text. Nothing infinite leaves: a masked token has -9999. The first token of a prompt has no log-probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdserve.gateway.generation.answer import TokenEntry
from pdserve.gateway.openai.options import finite_logprob
from pdserve.gateway.text.tokenizer import Detokenizer
from pdserve.messages import TokenLogprobs

BytesOf = Callable[[int], bytes]
"""A token by itself."""


def chat_logprobs(entries: list[TokenEntry], bytes_of: BytesOf, *, has_token_names: bool = False) -> dict[str, Any]:
    """The `logprobs` object of a chat choice; `has_token_names`: tokens go by their ids."""
    return {"content": [_chat_entry(entry, bytes_of, has_token_names) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenEntry, bytes_of: BytesOf, has_names: bool) -> dict[str, Any]:
    logprobs = entry.logprobs
    assert logprobs is not None, entry
    return {
        "token": _name(entry.token_id) if has_names else entry.text,
        "logprob": finite_logprob(logprobs.logprob),
        "bytes": list(_bytes_shown(entry, bytes_of)),
        "top_logprobs": [
            {
                "token": _name(token_id) if has_names else _shown(token_id, entry, bytes_of),
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
    has_token_names: bool = False
    """Tokens go by their ids."""

    def format(self, entries: list[TokenEntry]) -> dict[str, Any]:
        """The object for these tokens."""
        offsets = []
        for entry in entries:
            offsets.append(max(0, self.offset))
            self.offset += len(entry.text)
        return {
            "tokens": [_name(entry.token_id) if self.has_token_names else entry.text for entry in entries],
            "token_logprobs": [_logprob(entry) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def format_echo(self, echo: str, entries: list[TokenEntry]) -> dict[str, Any]:
        """The object for the prompt's tokens, whose text is `echo`: what the tokenizer put before it is not in it."""
        self.offset = len(echo) - sum(len(entry.text) for entry in entries)
        return self.format(entries)

    def _top(self, entry: TokenEntry) -> dict[str, float] | None:
        """Text → log-probability; of two tokens with equal text the likelier one, and always the sampled one."""
        logprobs = entry.logprobs
        if logprobs is None:
            return None
        own = _name(entry.token_id) if self.has_token_names else entry.text
        best = {own: finite_logprob(logprobs.logprob)}
        for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
            shown = _name(token_id) if self.has_token_names else _shown(token_id, entry, self.bytes_of)
            best.setdefault(shown, finite_logprob(logprob))
        return best


def _logprob(entry: TokenEntry) -> float | None:
    return None if entry.logprobs is None else finite_logprob(entry.logprobs.logprob)


def _name(token_id: int) -> str:
    """A token by its id: unlike its text, it is never that of another token or of half a character."""
    return f"token_id:{token_id}"


def _shown(token_id: int, entry: TokenEntry, bytes_of: BytesOf) -> str:
    return entry.text if token_id == entry.token_id else bytes_of(token_id).decode("utf-8", "replace")


# --- prompts


def prompt_entries(
    token_ids: list[int], logprobs: list[TokenLogprobs], detokenizer: Detokenizer, num_top: int
) -> list[TokenEntry]:
    """The tokens of an echoed prompt; `logprobs` begin with the second one, and may have more than `num_top`."""
    texts = [detokenizer.push([token_id]) for token_id in token_ids]
    texts[-1] += detokenizer.finish()
    told = [None, *[_first_of(entry, num_top) for entry in logprobs]]
    entries = zip(token_ids, texts, told, strict=True)
    return [TokenEntry(token_id, text, is_hidden=False, logprobs=entry) for token_id, text, entry in entries]


def _first_of(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    ids, logprobs = entry.top_token_ids[:num_top], entry.top_logprobs[:num_top]
    return TokenLogprobs(logprob=entry.logprob, top_token_ids=ids, top_logprobs=logprobs, rank=entry.rank)


def prompt_logprobs(
    token_ids: list[int], logprobs: list[TokenLogprobs], num_top: int, bytes_of: BytesOf
) -> list[dict[str, Any] | None]:
    """Each prompt token's own id and the likeliest ones, with log-probability, rank and text; null for the first."""

    def told(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = bytes_of(token_id).decode("utf-8", "replace")
        return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text}

    result: list[dict[str, Any] | None] = [None]
    for token_id, entry in zip(token_ids[1:], logprobs, strict=True):
        tops = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
        best = {str(top_id): told(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(tops, 1)}
        result.append({str(token_id): told(token_id, entry.logprob, entry.rank), **best})
    return result
