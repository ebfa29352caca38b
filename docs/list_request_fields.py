"""Rewrites the tables of request-fields.md: every field of every endpoint, out of the gateway's table. `make docs`

A test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from generated import rewrite, table, with_part

from pdserve.gateway.openai.request_fields import TABLES, Table, Treatment

DOCUMENT = Path(__file__).with_name("request-fields.md")


def tables() -> str:
    """Markdown: a heading and a table per endpoint."""
    parts = []
    for endpoint, fields in TABLES.items():
        served = ", ".join(f"`{name}`" for name, field in sorted(fields.items()) if field.treatment is Treatment.SERVED)
        parts.append(f"## `{endpoint}`\n\nServed: {served}.")
        if lines := list(rows(fields)):
            parts.append(table(("field", "is", "why", "asks for nothing"), lines))
    return "\n\n".join(parts)


def rows(fields: Table) -> Iterator[tuple[str, ...]]:
    """One line for each field that is not served."""
    for treatment in (Treatment.REFUSED, Treatment.HARMLESS):
        for name, field in sorted(fields.items()):
            if field.treatment is treatment:
                neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
                yield f"`{name}`", str(treatment), field.about, neutral


def updated(document: str) -> str:
    """The document with its generated part as it should be."""
    return with_part(document, "fields", tables())


if __name__ == "__main__":
    rewrite(DOCUMENT, updated)
