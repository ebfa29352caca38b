"""Rewrites the tables of settings.md: every setting of every process, out of the dataclasses. `make docs`

A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generated import rewrite, table, with_part

from pdserve.operator.settings import OperatorSettings
from pdserve.settings import SharedSettings
from pdserve.settings.field import Setting, settings_of
from pdserve.settings.load import shown
from pdserve.settings.roles import ENVIRONMENT_ONLY, ROLES

DOCUMENT = Path(__file__).with_name("settings.md")
PROCESSES: dict[str, type[SharedSettings]] = {**ROLES, "operator": OperatorSettings}
_HEAD = ("name", "default", "unit", "what it does", "takes", "why this default")


def tables() -> str:
    """Markdown: a heading and a table per process."""
    return "\n\n".join(f"## `pdserve {role}`\n\n{table(_HEAD, rows(cls))}" for role, cls in PROCESSES.items())


def rows(cls: type[SharedSettings]) -> Iterator[tuple[str, ...]]:
    """One line of the table for each setting that this process reads."""
    for name, (field, about) in settings_of(cls).items():
        if not about.is_refused:
            default = f"`{shown(field.default)}`" if field.default != "" else "empty"
            yield f"`{name}`", default, about.unit, about.help, about.kind.expected, about.why


def refused() -> str:
    """Markdown: a table of the settings that are known and refused."""
    found: dict[str, tuple[Setting, list[str]]] = {}
    for role, cls in PROCESSES.items():
        for name, (_, about) in settings_of(cls).items():
            if about.is_refused:
                found.setdefault(name, (about, []))[1].append(role)
    lines = ((f"`{name}`", ", ".join(roles), about.help, about.why) for name, (about, roles) in found.items())
    return table(("name", "processes", "what it will do", "why it is refused"), lines)


def variables() -> str:
    """Markdown: a table of the environment variables that are no setting."""
    return table(("variable", "what it says"), ((f"`PDS_{name}`", text) for name, text in ENVIRONMENT_ONLY.items()))


def updated(document: str) -> str:
    """The document with its generated parts as they should be."""
    for name, text in (("settings", tables()), ("refused", refused()), ("variables", variables())):
        document = with_part(document, name, text)
    return document


if __name__ == "__main__":
    rewrite(DOCUMENT, updated)
