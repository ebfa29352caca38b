"""The three things that a field of a model folder can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Treatment(StrEnum):
    """What pdserve does with a field."""

    USED = "used"
    """The answer depends on it, as the model's makers meant."""
    REFUSED = "refused"
    """A value that would change the answer, and that nothing here reads, ends the start with a sentence."""
    HARMLESS = "harmless"
    """Any value is accepted: no answer depends on it."""


@dataclass(frozen=True, slots=True)
class FolderField:
    """One field of a file."""

    treatment: Treatment
    about: str
    """What it decides, or why it is harmless or refused; ends a sentence of an error."""
    neutral: tuple[object, ...] = ()
    """Values beside null that ask for nothing, where it is refused."""

    def asks_nothing(self, value: object) -> bool:
        """Whether a refused field has a value that changes nothing."""
        return value is None or any(value == item and is_bool(value) == is_bool(item) for item in self.neutral)


def is_bool(value: object) -> bool:
    """True equals 1 in Python, and a switch that is on is no factor of one."""
    return isinstance(value, bool)


Fields = Mapping[str, FolderField]


def used(about: str) -> FolderField:
    """A field that is read."""
    return FolderField(Treatment.USED, about)


def refused(about: str, *neutral: object) -> FolderField:
    """A field of which only null and these values are accepted."""
    return FolderField(Treatment.REFUSED, about, neutral)


def harmless(about: str) -> FolderField:
    """A field that changes no answer."""
    return FolderField(Treatment.HARMLESS, about)


def each(names: str, field: FolderField) -> dict[str, Any]:
    """The same for several names, separated by blanks."""
    return dict.fromkeys(names.split(), field)
