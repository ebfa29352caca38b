"""Rewrites the tables of model-folders.md: every field of a model folder, out of the tables that check it. `make docs`

A test compares the two.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from generated import rewrite, table, with_part

from pdserve.models.fields.config_fields import COMMON, FAMILIES, FAMILY, FOREIGN, GENERATION
from pdserve.models.fields.generation_fields import GENERATION_CONFIG
from pdserve.models.fields.gguf_fields import ARCHITECTURES, GENERAL, OF_ARCHITECTURE
from pdserve.models.fields.rope_fields import ROPE
from pdserve.models.fields.tokenizer_fields import TOKENIZER_CONFIG
from pdserve.models.fields.treatment import Fields, FolderField, Treatment

DOCUMENT = Path(__file__).with_name("model-folders.md")


def tables() -> str:
    """Markdown: a heading and a table per file."""
    architectures = ", ".join(f"`{name}`" for name in ARCHITECTURES)
    return "\n\n".join(
        [
            f"## config.json: the same in all {len(FAMILIES)} families",
            _listing({**COMMON, **GENERATION}),
            "## config.json: what differs between families",
            _matrix(),
            "## config.json: inside of `rope_scaling` and `rope_parameters`",
            _listing(ROPE),
            "## generation_config.json",
            _listing(GENERATION_CONFIG),
            "## tokenizer_config.json",
            _listing(TOKENIZER_CONFIG),
            "## GGUF: keys of the architecture",
            f"Architectures: {architectures}. The keys stand here without the architecture's name.",
            _listing(OF_ARCHITECTURE),
            "## GGUF: all other keys",
            _listing(GENERAL),
        ]
    )


def _listing(fields: Fields) -> str:
    """A line for all fields that are treated alike for one reason."""
    lines = []
    for treatment in Treatment:
        chosen = [(name, field) for name, field in fields.items() if field.treatment is treatment]
        for field, group in groupby(sorted(chosen, key=_reason), key=lambda item: item[1]):
            names = ", ".join(f"`{name}`" for name, _ in group)
            lines.append((names, str(treatment), field.about, _neutral(field)))
    return table(("fields", "are", "why", "accepted"), lines)


def _reason(item: tuple[str, FolderField]) -> tuple[str, str, str]:
    name, field = item
    return field.about, _neutral(field), name


def _neutral(field: FolderField) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)


def _matrix() -> str:
    """A line for a field, a column for a family; what no family reads is one line for each reason."""
    read = sorted({name for fields in FAMILY.values() for name in fields})
    lines = [
        (f"`{name}`", *(_treatment(family, name) for family in FAMILIES), _about(name), _elsewhere(name))
        for name in read
    ]
    others = {name: field for name, field in FOREIGN.items() if name not in read}
    head = ("field", *FAMILIES, "what it decides", "accepted where refused")
    return "\n\n".join(
        [
            table(head, lines),
            "Fields of other architectures, which none of the ten reads:",
            _listing(others),
        ]
    )


def _treatment(family: str, name: str) -> str:
    field = FAMILY[family].get(name) or FOREIGN.get(name)
    return str(field.treatment) if field is not None else str(Treatment.HARMLESS)


def _about(name: str) -> str:
    return next(fields[name].about for fields in FAMILY.values() if name in fields)


def _elsewhere(name: str) -> str:
    return _neutral(FOREIGN[name]) if name in FOREIGN else ""


def updated(document: str) -> str:
    """The document with its generated part as it should be."""
    return with_part(document, "fields", tables())


if __name__ == "__main__":
    rewrite(DOCUMENT, updated)
