"""Rewrites modules.md: the first sentence of every module, by folder. `make modules`

A test compares the two, so that the list never lies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from generated import rewrite, with_part

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "modules.md"
FOLDERS = ("gateway", "prefill_worker", "decode_worker", "operator", "kernels", "src/pdserve")


def first_sentence(file: Path) -> str:
    """The first sentence of the module's docstring; empty without one."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


def rooms() -> Iterator[tuple[Path, list[Path]]]:
    """(folder, its own modules) of every folder with modules, parents first; what is linked counts where it lies."""
    for top in FOLDERS:
        root = ROOT / top
        for folder in sorted([root, *(path for path in root.rglob("*") if path.is_dir())]):
            is_linked = any(path.is_symlink() for path in (folder, *folder.parents))
            files = [] if is_linked else [file for file in sorted(folder.glob("*.py")) if file.name != "__main__.py"]
            if files:
                yield folder.relative_to(ROOT), [file.relative_to(ROOT) for file in files]


def modules() -> Iterator[Path]:
    """Every module once, in the order of the list."""
    for _, files in rooms():
        yield from files


def listing() -> str:
    """Markdown: a heading per folder, a line per module."""
    lines: list[str] = []
    for folder, files in rooms():
        lines += ["", f"### {folder.as_posix()}/", ""]
        lines += [f"- `{file.name}`: {first_sentence(ROOT / file)}" for file in files]
    return "\n".join(lines)


def updated(document: str) -> str:
    """The document with the list as it should be."""
    return with_part(document, "modules", listing())


if __name__ == "__main__":
    rewrite(DOCUMENT, updated)
