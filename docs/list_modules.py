"""Rewrites the module list in architecture.md: the first sentence of every module. `make modules`

A test compares the two, so that the list never lies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
FOLDERS = ("gateway", "prefill_worker", "decode_worker", "operator", "kernels", "src/pdserve")
_SECTION = re.compile(r"(<!-- modules -->\n).*?(<!-- /modules -->)", re.DOTALL)


def first_sentence(file: Path) -> str:
    """Of the module's docstring; empty without one."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


def modules() -> Iterator[Path]:
    """Every module, once: the links inside src/pdserve are not followed."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            is_linked = any(parent.is_symlink() for parent in file.parents)
            if not is_linked and file.name != "__main__.py":
                yield file.relative_to(ROOT)


def listing() -> str:
    """Markdown: a heading per folder, a line per module."""
    lines: list[str] = []
    folder = None
    for file in modules():
        if file.parent != folder:
            folder = file.parent
            lines += ["", f"### {folder.as_posix()}/", ""]
        lines.append(f"- `{file.name}`: {first_sentence(ROOT / file)}")
    return "\n".join(lines).strip() + "\n"


def updated(document: str) -> str:
    """The document with the list as it should be."""
    return _SECTION.sub(lambda match: f"{match[1]}\n{listing()}\n{match[2]}", document)


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
