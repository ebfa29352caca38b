"""Metrics, settings and commands that documents name exist; documents use terms of the field."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pdserve.cli import COMMANDS
from pdserve.settings import known_names

from .documents import DOCUMENTS, ROOT, without_fences

GENERATED = frozenset({"modules.md", "settings.md", "metrics.md"})
"""Pages that are made from the code, and compared with it elsewhere."""
OWN = [file for file in DOCUMENTS if file.parent.name != "measurements" and file.name not in GENERATED]
SETTING = re.compile(r"\b(PDS_)?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
NO_SETTINGS = frozenset({"OMP_WAIT_POLICY", "IPC_LOCK"})
"""Names in capitals that other software gives a meaning."""
PICTURES = re.compile(r"\b(nobody|somebody|whoever|doors?|pumps?|company|seniors?)\b", re.IGNORECASE)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@cache
def code() -> str:
    folders = ("gateway", "prefill_worker", "decode_worker", "operator", "kernels", "src", "benchmarks", "manifests")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".yaml"))
    return "\0".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("document", OWN, ids=name_of)
def test_metrics_that_are_named_exist(document: Path) -> None:
    names = set(re.findall(r"\bpd_[a-z0-9_]*[a-z0-9]\b", document.read_text(encoding="utf-8")))
    plain = {re.sub(r"_(sum|count|bucket|total)$", "", name) for name in names} - {"pd_long_prompts"}
    assert sorted(name for name in plain if f'"{name}' not in code()) == []


@pytest.mark.parametrize("document", OWN, ids=name_of)
def test_settings_that_are_named_exist(document: Path) -> None:
    found = {match[0].removeprefix("PDS_") for match in SETTING.finditer(document.read_text(encoding="utf-8"))}
    missing = found - known_names() - NO_SETTINGS - {"LONG_PROMPT_TOKENS"}
    assert sorted(name for name in missing if not re.search(rf"\b(PDS_)?{name}\b", code())) == []


@pytest.mark.parametrize("document", OWN, ids=name_of)
def test_commands_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"`pdserve ([a-z][a-z-]*)", document.read_text(encoding="utf-8")))
    assert sorted(named - set(COMMANDS)) == []


@pytest.mark.parametrize("document", OWN, ids=name_of)
def test_terms_of_the_field_stand_instead_of_pictures(document: Path) -> None:
    lines = without_fences(document.read_text(encoding="utf-8")).splitlines()
    assert [line for line in lines if PICTURES.search(line)] == []
