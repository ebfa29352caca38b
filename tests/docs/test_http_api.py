"""Fields, codes and reasons that docs/http-api.md lists are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pdserve.readiness import ReadyReason

from .documents import ROOT, code_spans

PAGE = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
SPANS = set(code_spans(PAGE))
REQUESTS = ("options.py", "chat.py", "completions.py")
READERS = {"integer", "number", "boolean", "text", "object", "items", "token_ids", "forbid", "get"}
PARTS_OF_MESSAGES = {
    *("role", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "type", "refusal", "text"),
    *("function", "arguments", "content", "tool_calls"),
}
"""Fields of a message, which the page describes in words."""


def calls(file: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def fields_read() -> set[str]:
    """Names of the fields that the bodies' readers ask for."""
    names: set[str] = set()
    for name in REQUESTS:
        for call in calls(ROOT / "gateway" / "openai" / name):
            match call:
                case ast.Call(func=ast.Attribute(attr=reader), args=[ast.Constant(value=str(field)), *_]):
                    names |= {field} if reader in READERS else set()
    return names - PARTS_OF_MESSAGES


def codes_sent() -> set[str]:
    """Codes that errors of the gateway are made with."""
    return {
        str(keyword.value.value)
        for file in (ROOT / "gateway").rglob("*.py")
        for call in calls(file)
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }


def test_every_field_that_is_read_is_on_the_page() -> None:
    listed = {part for span in SPANS for part in span.split(".")}
    assert len(fields_read()) > 30
    assert sorted(fields_read() - listed) == []


def test_every_code_that_is_sent_is_on_the_page() -> None:
    assert len(codes_sent()) > 10
    assert sorted(codes_sent() - SPANS) == []


@pytest.mark.parametrize("reason", [reason for reason in ReadyReason if reason != ReadyReason.UNKNOWN])
def test_every_reason_of_readiness_is_on_the_page(reason: ReadyReason) -> None:
    section = PAGE.split("## Readiness")[1].split("\n## ")[0]
    assert f"`{reason}`" in section


def test_every_path_is_on_the_page() -> None:
    texts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "gateway").rglob("*.py"))
    paths = set(re.findall(r'"(/(?:v1|health|ready|version|metrics|debug)[\w/]*)(?:\{[\w:]+\})?"', texts))
    assert len(paths) >= 8
    assert sorted(path for path in paths if path.rstrip("/") not in PAGE) == []
