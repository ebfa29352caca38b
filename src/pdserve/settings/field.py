"""One setting as a dataclass field: its default, unit and help, and the reason for its default.

A setting whose meaning comes with a later version is a field, too (`not_yet`): setting it ends the process at its start
with a sentence, because a setting without an effect would be believed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.settings.kinds import Kind, nothing

_METADATA_KEY = "pdserve.setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything about a setting that stands beside its field."""

    kind: Kind
    unit: str
    """The unit of the value: s, bytes, tokens, …; empty for words and switches."""
    help: str
    why: str
    """The reason for the default; of a refused setting the reason for refusing it."""
    derive: Callable[[Mapping[str, Any]], Any] | None = None
    """Computes the default from the other values (by upper-case name) when this one is not set."""
    is_refused: bool = False
    """Whether any value but none is an error."""


def setting(
    default: object,
    kind: Kind,
    help: str,  # noqa: A002  the word that every command line uses
    *,
    why: str,
    unit: str = "",
    derive: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Any:
    """A dataclass field that is a setting."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: Setting(kind, unit, help, why, derive)})


def not_yet(help: str, *, because: str, unit: str = "") -> Any:  # noqa: A002  as above
    """A dataclass field that is refused when it is set; its value is always None.

    Args:
        help: what the setting will do.
        because: what this version does instead, and what to do meanwhile.
        unit: the unit of the value that it will take.
    """
    about = Setting(nothing(because), unit, help, f"Not supported yet: {because}.", is_refused=True)
    return dataclasses.field(default=None, metadata={_METADATA_KEY: about})


def settings_of(cls: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Setting]]:
    """The settings of a process by upper-case name, in order."""
    return {
        field.name.upper(): (field, field.metadata[_METADATA_KEY])
        for field in dataclasses.fields(cls)
        if _METADATA_KEY in field.metadata
    }
