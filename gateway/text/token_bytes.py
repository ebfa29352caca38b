"""What each token id stands for in bytes, for the two kinds of decoders that nearly all models have.

Byte-level (GPT-2, Llama 3, Qwen): every character of a vocabulary entry stands for one byte; an added token is its own
text (the `tokenizers` library decodes one like `über` as bytes, too, which no client means).
SentencePiece (Llama 2, Gemma, Mistral): `▁` is a blank, `<0xE4>` is a byte, a leading blank may be dropped.
Both make the text of a sequence the UTF-8 decoding of its concatenated bytes, which is what lets a stream be
decoded in linear time. Other decoders are not described here: `TokenBytes.of` says None, and
detokenize.py falls back on the tokenizer itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BLANK = "▁"


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of the byte-level alphabet: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


@dataclass(frozen=True)
class DecoderRules:
    """How a SentencePiece-style decoder turns entries into text; all off for a byte-level one."""

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_fallback: bool = False
    num_stripped_blanks: int = 0
    """Blanks dropped at the very beginning of the text, at most."""
    drops_first_blanks: bool = False
    """Metaspace: all blanks of the very first token are dropped."""

    @classmethod
    def read(cls, steps: list[dict[str, Any]]) -> DecoderRules | None:
        """Rules of the decoder with these steps, None when they are of another kind."""
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(is_byte_level=True)
        rules: dict[str, Any] = {"replacements": ()}
        is_fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not is_fused:
                    rules["replacements"] = (*rules["replacements"], (old, new))
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme} if not is_fused:
                    rules["replacements"] = (*rules["replacements"], (old, " "))
                    rules["drops_first_blanks"] = scheme != "never" and old == _BLANK
                case {"type": "ByteFallback"} if not is_fused:
                    rules["has_byte_fallback"] = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                    rules["num_stripped_blanks"] = start
                case _:
                    return None
        return cls(**rules) if steps else None


class TokenBytes(dict[int, bytes]):
    """Token id → bytes, filled as ids are met. Shared by all streams of one model."""

    def __init__(self, tokenizer: Tokenizer, rules: DecoderRules, special_ids: frozenset[int]) -> None:
        super().__init__()
        self.tokenizer, self.rules, self.special_ids = tokenizer, rules, special_ids
        if rules.is_byte_level:  # an added token is text, even if each of its characters is in the alphabet of bytes
            for index, token in tokenizer.get_added_tokens_decoder().items():
                if not self._is_byte(token.content):
                    self[index] = token.content.encode()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes | None:
        """The table of this tokenizer; None: its text is not the concatenation of its tokens' bytes."""
        rules = DecoderRules.read(_decoder_steps(tokenizer))
        if rules is None:
            return None
        added = tokenizer.get_added_tokens_decoder()
        special_texts = {token.content for token in added.values() if token.special}
        ids = frozenset(index for index, token in added.items() if token.content in special_texts)
        return cls(tokenizer, rules, ids)

    def __missing__(self, token_id: int) -> bytes:
        """Bytes of one token, wherever it stands but at the very beginning; empty for an id without an entry."""
        entry = self.tokenizer.id_to_token(token_id)
        self[token_id] = b"" if entry is None else self._bytes_of(entry)
        return self[token_id]

    def at_start(self, token_id: int) -> bytes:
        """Bytes of the very first token of a text, for a tokenizer that drops its blanks."""
        entry = self.tokenizer.id_to_token(token_id)
        return b"" if entry is None else self._bytes_of(entry.replace(_BLANK, ""))

    def _is_byte(self, content: str) -> bool:
        """Whether an added token names the entry of a single byte, which nothing else could write."""
        return content in _BYTE_OF_CHARACTER and content in self.tokenizer.get_vocab(with_added_tokens=False)

    def _bytes_of(self, entry: str) -> bytes:
        if self.rules.is_byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in entry):
                return bytes(_BYTE_OF_CHARACTER[character] for character in entry)
            return entry.encode()
        for old, new in self.rules.replacements:
            entry = entry.replace(old, new)
        if self.rules.has_byte_fallback and len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
            try:
                return bytes([int(entry[3:5], 16)])
            except ValueError:
                pass
        return entry.encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps in order, nested sequences flattened."""
    if tokenizer.decoder is None:
        return []
    pending, steps = [json.loads(tokenizer.decoder.__getstate__())], []
    while pending:
        step = pending.pop(0)
        if step.get("type") == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            steps.append(step)
    return steps
