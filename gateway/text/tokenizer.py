"""Text ↔ token ids with the `tokenizers` library alone: whole texts both ways, and ids → text while they come.

Encoding and decoding whole texts blocks: called in worker threads, never on the loop. `encode_batch_fast` releases
the interpreter lock where `encode` holds it, so a long prompt stalls no stream.
A `Detokenizer` runs on the loop: never half a character, never a rewritten one, in linear time. At the end its pieces
are what the tokenizer's own `decode` makes of all ids, with one exception for the better: SentencePiece decoders turn
a whole run of bytes into U+FFFD when its last character is cut; here the complete characters of the run stay and the
cut one becomes a single U+FFFD. It never cleans up blanks.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from pdserve.errors import InvalidRequestError
from pdserve.gateway.text.control_tokens import ControlTokens
from pdserve.gateway.text.token_bytes import TokenBytes
from pdserve.gateway.text.tokenizer_files import read_control_tokens, read_special_tokens, read_tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes, so at most 4 tokens: what is still unfinished after 8 is not a character."""


class ModelTokenizer:
    """The tokenizer of one model folder; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: dict[str, str],
        literals: str = "",
        listed: frozenset[str] = frozenset(),
    ) -> None:
        """Wrap a tokenizer with what else its folder says.

        Args:
            tokenizer: of the `tokenizers` library.
            special_tokens: bos_token, eos_token, …, by name.
            literals: what the chat template writes.
            listed: control tokens that the folder names itself.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.backend_tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.token_bytes = TokenBytes.of(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        self.special_ids = frozenset(
            index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        """Ids whose text is not shown to clients unless they ask."""
        special = {token.content for token in added if token.special} | set(special_tokens.values())
        # A single word or white space steers nothing: a template and a client may both write it.
        marks = {t.content for t in added if not t.content.isspace() and not t.content.isalnum()}
        written = {mark for mark in marks if mark in literals}
        self.control_tokens = ControlTokens(tokenizer, special | written | listed)

    @classmethod
    def load(cls, path: Path, literals: str = "") -> ModelTokenizer:
        """Read a model folder.

        Raises:
            ModelError: the folder's tokenizer cannot be read.
        """
        return cls(read_tokenizer(path), read_special_tokens(path), literals, read_control_tokens(path))

    # --- text → ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text in which special-token strings are tokens."""
        return _encode(self.backend_tokenizer, text, add_special_tokens)

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat, traced: only the template writes control tokens.

        Raises:
            InvalidRequestError: the tokenizer makes a control token even of the single characters of a text.
        """
        ids = self.control_tokens.encode(rendered)
        if ids is None:
            raise InvalidRequestError(
                "a message contains a control token's text, which this tokenizer cannot keep as text", param="messages"
            )
        return ids

    # --- ids → text

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; special tokens are shown by default."""
        table = self.token_bytes
        if table is None or not table.rules.is_byte_level:
            return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        kept = [index for index in ids if not (skip_special_tokens and index in table.special_ids)]
        return b"".join([table[index] for index in kept]).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """One token by itself, as bytes: exact also for a part of a character."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self.decode([token_id]).encode()


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


# --- ids → text while they come


class HasBackend(Protocol):
    """Whatever wraps a `tokenizers.Tokenizer`."""

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The wrapped `tokenizers.Tokenizer`."""


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
        table = TokenBytes.of(backend) if token_bytes is None else token_bytes
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

    @property
    def has_rest(self) -> bool:
        """Whether `finish` would have something to return now: a part of a character came."""
        return self._decoding.has_rest


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
            if table.rules.drops_first_blanks:
                data = table.at_start(kept[0]) + data[len(table[kept[0]]) :]
            self._is_first = False
        text = self._utf8.decode(data)
        return self._strip(text) if self._num_blanks_to_strip else text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    @property
    def has_rest(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _strip(self, text: str) -> str:
        while text and self._num_blanks_to_strip:
            if text[0] != " ":
                self._num_blanks_to_strip = 0
                break
            text, self._num_blanks_to_strip = text[1:], self._num_blanks_to_strip - 1
        return text


class _WindowDecoding:
    """Decodes the tokens since the last complete character, with those before as context: right for any decoder."""

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

    @property
    def has_rest(self) -> bool:
        return bool(self._held)

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
