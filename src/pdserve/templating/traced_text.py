"""Text that knows, character by character, which string of a request it came from.

A chat template computes with the strings of a request: it compares, cuts, trims, joins and prints them. Here each of
them is a `TracedText`: equal to the plain string in every comparison, so a template decides as it always does, with
as many *sources* beside it, one character for each of its own. What a template makes of such texts is traced, too: in
the rendered prompt, what has the source TEMPLATE was written by the template, and all else by a client.

Where an operation is not followed exactly (a rare filter), its whole result counts as the client's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Self, SupportsIndex

from markupsafe import escape

TEMPLATE = "\0"
"""Source of what the template wrote itself."""
CLIENT = "\1"
"""Source of a client's strings that need no telling apart."""
_FIRST_FILLER = 0xF0000


def message_source(index: int) -> str:
    """The source of one message's text, by the message's position."""
    return chr(index + 2)


class TracedText(str):
    """A string with a source for each character."""

    __slots__ = ("_sources",)  # an underscore keeps it out of templates
    _sources: str

    def __new__(cls, text: str, sources: str) -> Self:
        """`sources` is as long as the text."""
        made = super().__new__(cls, text)
        made._sources = sources
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return TracedText(super().__getitem__(key), self._sources[key])

    def __iter__(self) -> Iterator[str]:
        return map(TracedText, super().__iter__(), self._sources)

    def __add__(self, other: Any) -> Any:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return TracedText(super().__mul__(times), self._sources * times)

    __rmul__ = __mul__

    def lstrip(self, chars: str | None = None, /) -> str:
        """The text without white space (or these characters) in front."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        """The text without white space (or these characters) at its end."""
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> str:
        """The text without white space (or these characters) around it."""
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        """The text without this beginning, if it has it."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        """The text without this end, if it has it."""
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """The pieces between separators, cut from the left."""
        return self._found(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """The pieces between separators, cut from the right."""
        return self._found(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        """The lines, with or without their ends."""
        whole = self._found(super().splitlines(keepends=True), "")
        return [line[: len(text)] for line, text in zip(whole, super().splitlines(keepends), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """What is before the first separator, the separator, and the rest."""
        before, _, _ = super().partition(sep)
        return self[: len(before)], self[len(before) :][: len(sep)], self[len(before) + len(sep) :]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """What is before the last separator, the separator, and the rest."""
        before, found, after = super().rpartition(sep)
        return self[: len(before)], self[len(before) :][: len(found)], self[len(self) - len(after) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """The text with `new` for `old`; what stands in a client's place is the client's."""
        if not old:
            return str(inherit(super().replace(old, new, count), (self,)))
        first, *others = self.split(old, count)
        pieces, position = [first], len(first)
        for piece in others:
            source = self._sources[position]
            pieces += [new if source == TEMPLATE else TracedText(new, source * len(new)), piece]
            position += len(old) + len(piece)
        return concat(pieces)

    def join(self, texts: Iterable[str], /) -> str:
        """These texts with this one between them."""
        return join(self, texts)

    def _found(self, parts: list[str], sep: str | None) -> list[str]:
        """The same parts, cut out of this text: they follow each other with `sep` (None: white space) between."""
        found, position = [], 0
        for part in parts:
            position = self.find(part, position) if sep is None else position
            found.append(self[position : position + len(part)])
            position += len(part) + len(sep or "")
        return found


class MarkupText(TracedText):
    """What the filters `safe` and `escape` return: adding other text to it escapes that text, as MarkupSafe does."""

    __slots__ = ()

    def __html__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        text = concat((self, escaped(other)))
        return MarkupText(text, sources_of(text))

    def __radd__(self, other: Any) -> Any:
        text = concat((escaped(other), self))
        return MarkupText(text, sources_of(text))


class NullText(TracedText):
    """A content that is null: empty where a template prints or cuts it, null where a template asks what it is."""

    __slots__ = ()

    def __new__(cls) -> Self:
        """Make the one value that there is."""
        return super().__new__(cls, "", "")

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NullText)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)


class JsonObject(dict[str, Any]):
    """A tool call's arguments: an object, and the JSON text of it where a template prints or joins it."""

    def __init__(self, members: Mapping[str, Any], text: TracedText) -> None:
        """`text`: what the client sent."""
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: Any) -> Any:
        return self._text + other

    def __radd__(self, other: Any) -> Any:
        return other + self._text


def sources_of(text: str) -> str:
    """The sources of any string; a plain one is the template's."""
    return text._sources if isinstance(text, TracedText) else TEMPLATE * len(text)


def trace(value: Any, source: str = CLIENT) -> Any:
    """A JSON value whose strings, keys included, have this source."""
    if isinstance(value, str):
        return TracedText(value, source * len(value))
    if isinstance(value, dict):
        return {trace(key, source): trace(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [trace(item, source) for item in value]
    return value


def first_traced(value: Any) -> TracedText | None:
    """The first traced string in a value; None when there is none."""
    if isinstance(value, TracedText):
        return value if value else None
    if isinstance(value, Mapping):
        value = (item for pair in value.items() for item in pair)
    elif not isinstance(value, list | tuple):
        return None
    return next((found for item in value if (found := first_traced(item)) is not None), None)


def inherit(result: Any, inputs: tuple[Any, ...]) -> Any:
    """A result with the source of what it was made of, if that was traced and the result is not.

    One as long as its first input (upper case, say) has that input's sources; another one has throughout the source of
    the first text among the inputs. What shows a list or an object shows no message's text: it is a client's.
    """
    if not isinstance(result, str) or isinstance(result, TracedText) or first_traced(inputs) is None:
        return result
    first = next((value for value in inputs if isinstance(value, TracedText) and value), None)
    if first is None:
        return TracedText(result, CLIENT * len(result))
    if first is inputs[0] and len(first) == len(result):
        return TracedText(result, first._sources)
    source = next((source for source in first._sources if source != TEMPLATE), CLIENT)
    return TracedText(result, source * len(result))


def concat(texts: Iterable[str]) -> str:
    """All texts in a row, as `"".join`."""
    texts = list(texts)
    if not any(isinstance(text, TracedText) for text in texts):
        return "".join(texts)
    return TracedText("".join(texts), "".join(map(sources_of, texts)))


def join(separator: str, texts: Iterable[Any]) -> str:
    """All texts with a separator between."""
    pieces: list[str] = []
    for text in texts:
        pieces += [separator, printed(text)]
    return concat(pieces[1:])


def printed(value: Any) -> str:
    """What a template shows of a value."""
    return value if isinstance(value, str) else inherit(str(value), (value,))


def escaped(value: Any) -> MarkupText:
    """The text with HTML's special characters escaped, unless it already is."""
    text = printed(value)
    if not isinstance(text, MarkupText):
        shown = ((str.__str__(escape(char)), source) for char, source in zip(text, sources_of(text), strict=True))
        text = concat(TracedText(char, source * len(char)) for char, source in shown)
    return MarkupText(text, sources_of(text))


def formatted(form: Callable[..., str], template: str, values: Any) -> str:
    """The result of `form(template, values)`, traced: a second run with fillers shows where each value went."""
    fillers: dict[str, TracedText] = {}
    numbers = count(_FIRST_FILLER)

    def fill(value: Any) -> Any:
        if isinstance(value, TracedText):
            filler = chr(next(numbers))
            fillers[filler] = value
            return filler * len(value)
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return {key: fill(item) for key, item in value.items()} if type(value) is dict else value

    result = str.__str__(form(template, values))
    shown = form(template, fill(values))
    if not fillers or isinstance(template, TracedText) or len(shown) != len(result):
        return str(inherit(result, (values, template)))
    left = {filler: iter(sources_of(text)) for filler, text in fillers.items()}
    return TracedText(result, "".join(next(left[char], CLIENT) if char in left else TEMPLATE for char in shown))


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` of chat templates, traced; unlike Jinja's own it does not escape HTML.

    Raises:
        TypeError: a value that JSON has no form for.
    """
    between, colon = separators or ((", " if indent is None else ","), ": ")
    step = " " * indent if isinstance(indent, int) else indent

    def line(depth: int) -> str:
        return "" if step is None else "\n" + step * depth

    def quoted(text: str) -> str:
        inner = json.dumps(str.__str__(text), ensure_ascii=ensure_ascii)[1:-1]
        return concat(('"', inherit(inner, (text,)), '"'))

    def pieces(value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, NullText):
            yield "null"
        elif isinstance(value, str):
            yield quoted(value)
        elif isinstance(value, dict) and value:
            for number, (key, item) in enumerate(sorted(value.items()) if sort_keys else value.items()):
                yield (between if number else "{") + line(depth + 1)
                yield from (quoted(key if isinstance(key, str) else json.dumps(key)), colon)
                yield from pieces(item, depth + 1)
            yield line(depth) + "}"
        elif isinstance(value, list | tuple) and value:
            for number, item in enumerate(value):
                yield (between if number else "[") + line(depth + 1)
                yield from pieces(item, depth + 1)
            yield line(depth) + "]"
        else:
            yield json.dumps(value, ensure_ascii=ensure_ascii)

    return concat(pieces(value, 0))
