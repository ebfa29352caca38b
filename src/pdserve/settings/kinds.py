"""What a setting's value may be: parse from text, or say what was expected. Knows no setting by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})
_SIZE = re.compile(r"(\d+)\s*(|[KMGT]i?B?)", re.IGNORECASE)
_SIZE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to read a value. `parse` raises ValueError; the complaint then says `expected`."""

    parse: Callable[[str], object]
    expected: str


def is_boolean_word(text: str) -> bool:
    """Whether a flag's next word is its value and not the next flag."""
    return text.lower() in _TRUE | _FALSE


def _parse_boolean(text: str) -> bool:
    if not is_boolean_word(text):
        raise ValueError(text)
    return text.lower() in _TRUE


boolean = Kind(_parse_boolean, "on or off (also true, false, 1, 0)")


def integer(low: int, high: int | None = None) -> Kind:
    """A whole number in [low, high]."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return Kind(parse, f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}")


def number(low: float, high: float | None = None, *, above: bool = False) -> Kind:
    """A finite number >= low (> low when `above`), <= high."""

    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < low or (above and value == low) or (high is not None and value > high):
            raise ValueError(text)
        return value

    bound = f"a number {'>' if above else '>='} {low:g}"
    return Kind(parse, bound if high is None else f"{bound} and <= {high:g}")


seconds = number(0.0, above=True)
seconds_or_zero = number(0.0)
ratio = number(0.0, 1.0, above=True)
port = integer(0, 65535)


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(text)
    power = _SIZE_POWERS[match[2][:1].upper()]
    return int(match[1]) * int(1024**power)


size_bytes = Kind(_parse_size, "a number of bytes > 0, with or without KiB, MiB, GiB (powers of 1024)")


def choice(*options: str) -> Kind:
    """One of these words, in capitals or not."""

    def parse(text: str) -> str:
        if text.lower() not in options:
            raise ValueError(text)
        return text.lower()

    return Kind(parse, "one of " + ", ".join(options))


def pattern(expression: str, expected: str) -> Kind:
    """Text that matches a regular expression as a whole."""

    def parse(value: str) -> str:
        if re.fullmatch(expression, value) is None:
            raise ValueError(value)
        return value

    return Kind(parse, expected)


text = pattern(r"(?s).*\S.*", "text that is not empty")


def _parse_names(value: str) -> str:
    names = [word.strip() for word in value.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(value)
    return ",".join(names)


names = Kind(_parse_names, "one name, or several different ones separated by commas")
name = pattern(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "letters, digits, '-', '_' and '.'")


def optional(kind: Kind) -> Kind:
    """What the kind takes, or the word `none`."""
    return Kind(lambda word: None if word.lower() == "none" else kind.parse(word), f"{kind.expected}, or none")


def nothing(because: str) -> Kind:
    """Only `none`: the kind of a setting that has no meaning yet, and why."""

    def parse(word: str) -> None:
        if word.lower() != "none":
            raise ValueError(word)

    return Kind(parse, f"none, for it is not supported yet: {because}")
