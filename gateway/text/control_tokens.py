"""Encodes a rendered chat so that only the template writes control tokens.

`<|im_end|>` in a client's message must stay text; the same string written by the chat template is the token. The text
is traced, so both can be told apart, and the tokenizer itself says which strings are control tokens, whatever its
normalizer makes of them (full width, upper case, compatibility forms):

1. Each stretch that the template wrote is encoded by itself: its control tokens are the wanted ones.
2. The whole text is encoded. When its control tokens are the wanted ones, this is the prompt.
3. Else a client's text has become one, and the text is encoded by a tokenizer that knows control tokens only under
   secret names: those are written where the template wrote the tokens, and what remains is text.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from tokenizers import AddedToken, Encoding, Tokenizer

from pdserve.templating.traced_text import TEMPLATE, sources_of

_MAX_PASSES = 16
_MAX_CACHED = 4096
"""Characters of a stretch that is worth remembering: templates write the same ones again and again."""
_STRETCH = re.compile(f"{TEMPLATE}+")


@dataclass(frozen=True)
class Occurrence:
    """A control token at the characters [start, end) of a text."""

    start: int
    end: int
    token_id: int

    def covers(self, other: Occurrence) -> bool:
        """Whether this is the same token there; it may take white space around it, too."""
        return self.token_id == other.token_id and self.start <= other.start and other.end <= self.end


class ControlTokens:
    """The tokens that steer a model, as found in one tokenizer and one template; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        """`texts`: special tokens and others that the template writes."""
        self._tokenizer = tokenizer
        self._ids = frozenset(n for text in texts if (n := tokenizer.token_to_id(text)) is not None)
        self._unknown = _Unknown(tokenizer)
        self._lock = threading.Lock()
        self._written = lru_cache(maxsize=1024)(self._find_all)

    def encode(self, rendered: str) -> list[int] | None:
        """Ids of a traced text; None when the tokenizer makes a control token even of a text cut in pieces."""
        text, wanted = str.__str__(rendered), self._wanted(rendered)
        encoding = _encode(self._tokenizer, text)
        found = self._find(text, encoding)
        if len(found) == len(wanted) and all(map(Occurrence.covers, found, wanted)):
            return list(encoding.ids)
        with self._lock:
            renamed = self._renamed
        return renamed.encode(text, wanted)

    def _wanted(self, rendered: str) -> list[Occurrence]:
        """The control tokens that the template wrote, from left to right."""
        wanted = []
        for stretch in _STRETCH.finditer(sources_of(rendered)):
            start, end = stretch.span()
            text = str.__str__(rendered)[start:end]
            find = self._written if len(text) <= _MAX_CACHED else self._find_all
            wanted += [Occurrence(start + at.start, start + at.end, at.token_id) for at in find(text)]
        return wanted

    def _find_all(self, text: str) -> list[Occurrence]:
        return self._find(text, _encode(self._tokenizer, text))

    def _find(self, text: str, encoding: Encoding) -> list[Occurrence]:
        """The control tokens in an encoding of the text."""
        ids = encoding.ids
        if self._ids.isdisjoint(ids):
            return []
        found = [Occurrence(*_span(encoding, n), token_id) for n, token_id in enumerate(ids) if token_id in self._ids]
        return [token for token in found if self._unknown.is_name(token.token_id, text[token.start : token.end])]

    @cached_property
    def _renamed(self) -> _RenamedTokenizer:
        return _RenamedTokenizer(self._tokenizer, self._ids)


class _Unknown:
    """The token for characters that a tokenizer does not know: its name is a control token, such characters are not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._name = str(getattr(tokenizer.model, "unk_token", None) or "")
        self._id = tokenizer.token_to_id(self._name)
        self._normalizer = tokenizer.normalizer

    def is_name(self, token_id: int, text: str) -> bool:
        """Whether a token stands for its name: true for all tokens but this one."""
        if token_id != self._id:
            return True
        normalized = self._normalizer.normalize_str(text) if self._normalizer else text
        return self._name in (text.strip(), normalized.strip())


class _RenamedTokenizer:
    """A copy of the tokenizer in which control tokens have secret names.

    Everything else (normalizing, cutting, merging) is the tokenizer's own, in one pass over the whole text.
    """

    def __init__(self, tokenizer: Tokenizer, control_ids: frozenset[int]) -> None:
        content = json.loads(tokenizer.to_str())
        copy = Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))
        copy.no_truncation()
        copy.no_padding()
        nonce = secrets.token_hex(8)
        self._tokenizer, self._unknown = copy, _Unknown(copy)
        self._names = {token_id: f"<{nonce}-{token_id}>" for token_id in control_ids}
        self._break = f"<{nonce}-break>"
        added = dict.fromkeys(control_ids, AddedToken("")) | tokenizer.get_added_tokens_decoder()
        self._real_ids: dict[int, int] = {}
        for token_id, like in sorted(added.items()):
            name = self._names.get(token_id, like.content)
            is_kept = token_id not in control_ids
            flags = {"single_word": like.single_word, "lstrip": like.lstrip, "rstrip": like.rstrip}
            copy.add_tokens([AddedToken(name, normalized=like.normalized and is_kept, **flags)])
            self._real_ids[_id_of(copy, name)] = token_id
        copy.add_tokens([AddedToken(self._break, normalized=False)])
        self._break_id = _id_of(copy, self._break)
        self._word_ids = control_ids - self._real_ids.keys()
        """Control tokens that are words of the vocabulary, too."""

    def encode(self, text: str, wanted: list[Occurrence]) -> list[int] | None:
        """Ids of the text with exactly the wanted control tokens; None if that cannot be.

        A word that is a control token is cut after its first character.
        """
        pieces, position = [], 0
        for token in wanted:
            pieces += [text[position : token.start], self._names[token.token_id]]
            position = token.end
        named = "".join([*pieces, text[position:]])
        for _ in range(_MAX_PASSES):
            encoding = _encode(self._tokenizer, named)
            ids = encoding.ids
            words = [(token_id, _span(encoding, n)) for n, token_id in enumerate(ids) if token_id in self._word_ids]
            cuts = [start + 1 for token_id, (start, end) in words if self._unknown.is_name(token_id, named[start:end])]
            if not cuts:
                return [self._real_ids.get(token_id, token_id) for token_id in ids if token_id != self._break_id]
            edges = [0, *cuts, len(named)]
            named = self._break.join(named[start:end] for start, end in pairwise(edges))
        return None


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    """Releases the interpreter lock, which `encode` does not."""
    encoding: Encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    return encoding


def _span(encoding: Encoding, index: int) -> tuple[int, int]:
    """The characters of one token."""
    return encoding.token_to_chars(index) or (0, 0)


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id
