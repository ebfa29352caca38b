"""Keeps control tokens apart from text that only looks like them.

`<|im_end|>` in a client's message must stay text; the same string written by the chat template is the token.
Once rendered both look alike, so the client's strings carry marks through the template:

1. `mark` puts a START before each control-token string in a client's text, and an EDGE where such a text could
   be one part of a control token whose other parts are its neighbours. Marks are single private-use characters
   that occur nowhere in the request, so no client can write them, and most texts get none.
2. `find` takes the marks out of the rendered text and tells the tokens that the template itself wrote from
   those in which a client's text has a part.

Nothing here encodes anything; tokenizer.py does.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_PRIVATE_USE = range(0xF0000, 0xFFFFD, 2)


@dataclass(frozen=True)
class Marks:
    """Two characters that occur nowhere else in one request."""

    start: str
    edge: str

    @property
    def escaped(self) -> tuple[str, str]:
        """Both as a template writes them that asks `tojson` for ASCII."""
        return json.dumps(self.start)[1:-1], json.dumps(self.edge)[1:-1]


@dataclass(frozen=True)
class Occurrence:
    """A control token's string in a rendered text, at [start, end)."""

    start: int
    end: int
    is_written_by_template: bool


@dataclass(frozen=True)
class ControlTokens:
    """The strings that steer a model, as found in one tokenizer and one template."""

    control: frozenset[str]
    added: frozenset[str]
    """All strings that the tokenizer cuts out before encoding, `control` included: they compete for characters."""
    _pattern: re.Pattern[str] = field(init=False)
    _added_pattern: re.Pattern[str] = field(init=False)
    _heads: frozenset[str] = field(init=False)
    _tails: frozenset[str] = field(init=False)
    _all: str = field(init=False)
    _longest: int = field(init=False)

    def __post_init__(self) -> None:
        cuts = [(token, cut) for token in self.control for cut in range(1, len(token))]
        object.__setattr__(self, "_pattern", _any_of(self.control))
        object.__setattr__(self, "_added_pattern", _any_of(self.added | self.control))
        object.__setattr__(self, "_heads", frozenset(token[:cut] for token, cut in cuts))
        object.__setattr__(self, "_tails", frozenset(token[cut:] for token, cut in cuts))
        object.__setattr__(self, "_all", "\0".join(sorted(self.control)))
        object.__setattr__(self, "_longest", max(map(len, self.control), default=0))

    def choose_marks(self, *values: Any) -> Marks | None:
        """Marks for these JSON values, None when no string in them needs any."""
        texts = list(_strings(values))
        if not any(self._needs_mark(text) for text in texts):
            return None
        for code in _PRIVATE_USE:
            marks = Marks(chr(code), chr(code + 1))
            taken = (marks.start, marks.edge, *marks.escaped)
            if not any(mark in text for text in texts for mark in taken):
                return marks
        raise AssertionError("a request with all private-use characters is larger than any accepted body")

    def mark(self, value: Any, marks: Marks) -> Any:
        """The same JSON value with marks in its strings, keys included."""
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, dict):
            return {self._mark_occurrences(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, marks) for item in value]
        return value

    def find(self, rendered: str, marks: Marks) -> tuple[str, list[Occurrence]]:
        """The text without marks, and the control-token strings in it from left to right."""
        text, starts, edges = _without_marks(rendered, marks)
        found: list[Occurrence] = []
        position = 0
        while match := self._added_pattern.search(text, position):
            start, position = match.span()
            if match[0] not in self.control:
                continue
            has_start = bisect_left(starts, position) > bisect_left(starts, start)
            has_edge = bisect_left(edges, position) > bisect_right(edges, start)
            is_clients = has_start or has_edge
            found.append(Occurrence(start, position, not is_clients))
            position = start + 1 if is_clients else position
        return text, found

    def _needs_mark(self, text: str) -> bool:
        core = text.strip()
        return self._ends_with_head(core) or self._begins_with_tail(core) or self._pattern.search(text) is not None

    def _mark_text(self, text: str, marks: Marks) -> str:
        core = text.strip()
        lead = text[: len(text) - len(text.lstrip())]
        trail = text[len(lead) + len(core) :]
        before = marks.edge if self._begins_with_tail(core) else ""
        after = marks.edge if self._ends_with_head(core) else ""
        return lead + before + self._mark_occurrences(core, marks) + after + trail

    def _mark_occurrences(self, text: str, marks: Marks) -> str:
        return self._pattern.sub(lambda match: marks.start + match[0], text)

    def _ends_with_head(self, text: str) -> bool:
        """Whether the text ends with the beginning of a control token, or is the middle of one."""
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(text[-size:] in self._heads for size in sizes) or self._is_middle(text)

    def _begins_with_tail(self, text: str) -> bool:
        """Whether the text begins with the end of a control token, or is the middle of one."""
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(text[:size] in self._tails for size in sizes) or self._is_middle(text)

    def _is_middle(self, text: str) -> bool:
        return 0 < len(text) < self._longest and text in self._all


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest, as tokenizers match added tokens."""
    longest_first = sorted((token for token in tokens if token), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _without_marks(rendered: str, marks: Marks) -> tuple[str, list[int], list[int]]:
    """(text, positions of start marks, positions of edge marks), positions in the text without marks."""
    pieces: list[str] = []
    starts: list[int] = []
    edges: list[int] = []
    length = 0
    (start_forms, edge_forms) = zip((marks.start, marks.edge), marks.escaped, strict=True)
    for piece in re.split(f"({'|'.join(map(re.escape, (*start_forms, *edge_forms)))})", rendered):
        if piece in start_forms:
            starts.append(length)
        elif piece in edge_forms:
            edges.append(length)
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), starts, edges
