"""Every path that a document names in backticks exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from .documents import DOCUMENTS, ROOT, code_spans

ROOMS = (
    "",
    "src/pdserve",
    "docs",
    "tests",
    "gateway",
    "prefill_worker",
    "decode_worker",
    "operator",
    "kernels",
    "benchmarks",
    "manifests",
)
"""Folders that a path may be relative to: the root, the package, and the rooms that documents speak of."""
SUFFIXES = ("py", "md", "h", "cpp", "yaml", "toml", "sh", "go")
PATH = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.\-*]*(/[A-Za-z0-9_.\-*]+)*/?")
"""A span that may be a path: plain names, slashes between them, `*` for many; a URL's path begins with a slash."""
NOT_PATHS = frozenset({"application/json"})


def is_path(span: str) -> bool:
    """Whether a span in backticks names a file or folder of the repository: by its ending, or by its first folder."""
    if not PATH.fullmatch(span) or span in NOT_PATHS:
        return False
    first = span.split("/", maxsplit=1)[0]
    return span.rpartition(".")[2] in SUFFIXES or (
        "/" in span and any((ROOT / room / first).is_dir() for room in ROOMS)
    )


@cache
def file_names() -> frozenset[str]:
    """Names of all files of the root and below the rooms."""
    inside = (file for room in ROOMS if room for file in (ROOT / room).rglob("*"))
    return frozenset(file.name for file in (*ROOT.iterdir(), *inside) if file.is_file())


def exists(span: str, document: Path) -> bool:
    """Whether a path exists, relative to the document or a room; a name without a folder may lie anywhere."""
    if "/" not in span.rstrip("/") and span in file_names():
        return True
    return any(any(folder.glob(span.rstrip("/"))) for folder in (document.parent, *(ROOT / room for room in ROOMS)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_paths_in_backticks_exist(document: Path) -> None:
    spans = dict.fromkeys(filter(is_path, code_spans(document.read_text(encoding="utf-8"))))
    assert [span for span in spans if not exists(span, document)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if ":" in name:
            continue
        file = document.parent / name if name else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """The anchors that a forge makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "span", ["gateway/app.py", "sse.py", "bus/", "docs/concepts.md", "kernels/cpu", "tests/kernels/test_*.py"]
)
def test_a_path_is_recognised_and_found(span: str) -> None:
    assert is_path(span)
    assert exists(span, ROOT / "README.md")


@pytest.mark.parametrize("span", ["gateway/nowhere.py", "nowhere.py", "kernels/nowhere/"])
def test_a_path_that_does_not_exist_is_seen(span: str) -> None:
    assert is_path(span)
    assert not exists(span, ROOT / "README.md")


@pytest.mark.parametrize("span", ["/v1/models", "pdserve up", "TRANSPORT=auto", "hf://owner/name", "usage.timing"])
def test_what_is_no_path_is_left_alone(span: str) -> None:
    assert not is_path(span)
