"""Token ids → text while they come: never half a character, never a rewritten one, in linear time.

At the end the pieces are what the tokenizer's own `decode` makes of all ids, with one exception for the better:
SentencePiece decoders turn a whole run of bytes into U+FFFD when its last character is cut; here the complete
characters of the run stay and the cut one becomes a single U+FFFD. Never cleans up blanks.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer

from pdserve.gateway.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes, so at most 4 tokens: what is still unfinished after 8 is not a character."""


class HasBackend(Protocol):
    """Whatever wraps a `tokenizers.Tokenizer`."""

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The wrapped one."""


class Detokenizer:
    """One stream of one sequence."""

    def __init__(
        self,
        tokenizer: Tokenizer | HasBackend,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        """`continues`: the text goes on after a prompt, so a leading blank belongs to it.

        `token_bytes`: the table of this very tokenizer, when there is one to share.
        """
        backend = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
        table = token_bytes or TokenBytes.of(backend)
        self._decoding: _ByteDecoding | _WindowDecoding = (
            _WindowDecoding(backend, skip_special_tokens)
            if table is None
            else _ByteDecoding(table, skip_special_tokens, continues)
        )

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return self._decoding.push(ids)

    def finish(self) -> str:
        """What is left: at most one U+FFFD for a character that was cut."""
        return self._decoding.finish()


class _ByteDecoding:
    """Bytes of the tokens into an incremental UTF-8 decoder."""

    def __init__(self, table: TokenBytes, skip_special_tokens: bool, continues: bool) -> None:
        self._table, self._skipped = table, table.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not continues
        self._num_blanks_to_strip = 0 if continues else table.rules.num_stripped_blanks

    def push(self, ids: Iterable[int]) -> str:
        table, skipped = self._table, self._skipped
        kept = [token_id for token_id in ids if token_id not in skipped]
        data = b"".join([table[token_id] for token_id in kept])
        if self._is_first and kept:
            data = table.at_start(kept[0]) + b"".join([table[token_id] for token_id in kept[1:]])
            self._is_first = False
        text = self._utf8.decode(data)
        return self._strip(text) if self._num_blanks_to_strip else text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        while text and self._num_blanks_to_strip:
            if text[0] != " ":
                self._num_blanks_to_strip = 0
                break
            text, self._num_blanks_to_strip = text[1:], self._num_blanks_to_strip - 1
        return text


class _WindowDecoding:
    """For any other decoder: decode the tokens since the last complete character, with those before as context."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        pieces = []
        for token_id in ids:
            self._held.append(token_id)
            text = self._decode([*self._context, *self._held])
            if not text.endswith(REPLACEMENT) or len(self._held) >= MAX_HELD_TOKENS:
                pieces.append(self._release(text))
        return "".join(pieces)

    def finish(self) -> str:
        return self._release(self._decode([*self._context, *self._held]))

    def _release(self, text: str) -> str:
        """The new part of `text`; tokens without text of their own join the context of the next ones."""
        released = text[len(self._context_text) :]
        self._context = self._held if released else [*self._context, *self._held][-MAX_HELD_TOKENS:]
        self._context_text, self._held = self._decode(self._context), []
        return released

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
