"""The sentences that docs/troubleshooting.md explains are sentences that the product says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .documents import ROOT, code_spans

FOLDERS = ("gateway", "prefill_worker", "decode_worker", "kernels", "src")
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MIN_LENGTH = 8
"""Characters of a piece between two variable parts that is worth looking for."""


def symptoms() -> list[str]:
    """Product's own words in the first column; names of metrics, fields and protocol words are no sentences."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    return [span for cell in cells for span in code_spans(cell) if " " in span and not span.startswith("pdserve ")]


def literals() -> Iterator[str]:
    """Every text of the code; what a formatted one leaves open is `…`."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[-.\d]*[sdgfr]", "…", node.value)


@pytest.fixture(scope="module")
def said() -> str:
    return "\0".join(literals())


@pytest.mark.parametrize("sentence", symptoms())
def test_the_product_says_what_the_page_explains(sentence: str, said: str) -> None:
    pieces = [piece.strip(" :;,.()") for piece in sentence.split("…")]
    missing = [piece for piece in pieces if len(piece) >= MIN_LENGTH and piece not in said]
    assert not missing, missing


def test_enough_sentences_are_looked_for() -> None:
    assert len(symptoms()) > 30
