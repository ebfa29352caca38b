"""Rewrites the generated part of a page: what stands between `<!-- NAME -->` and `<!-- /NAME -->`.

The scripts beside this one make such parts from the code; tests compare them, so that they never lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def with_part(document: str, name: str, text: str) -> str:
    """The document with this text as its part of that name.

    Raises:
        ValueError: the document has no such part.
    """
    part = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    replaced, count = part.subn(lambda match: f"{match[1]}\n{text.strip()}\n\n{match[2]}", document)
    if count != 1:
        raise ValueError(f"the document has {count} parts <!-- {name} -->, one is needed")
    return replaced


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `|` in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def rewrite(page: Path, updated: Callable[[str], str]) -> None:
    """Write the page as it should be."""
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
