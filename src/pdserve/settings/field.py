"""One setting as a dataclass field: its default, unit and help, and the reason for its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.settings.kinds import Kind

_METADATA_KEY = "pdserve.setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is written beside a field."""

    kind: Kind
    unit: str
    """s, bytes, tokens, …; empty for words and switches."""
    help: str
    why: str
    """The reason for the default."""
    derive: Callable[[Mapping[str, Any]], Any] | None = None
    """Computes the default from the other values when nobody sets this one."""


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


def settings_of(cls: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Setting]]:
    """The settings of a process by upper-case name, in order."""
    return {
        field.name.upper(): (field, field.metadata[_METADATA_KEY])
        for field in dataclasses.fields(cls)
        if _METADATA_KEY in field.metadata
    }
