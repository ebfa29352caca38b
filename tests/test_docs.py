"""The documentation that can be checked is."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.commands.up import QUESTION

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def list_modules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_modules", ROOT / "docs" / "list_modules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_module_list_is_up_to_date(list_modules: ModuleType) -> None:
    document = list_modules.DOCUMENT.read_text(encoding="utf-8")
    assert document == list_modules.updated(document), "run: make modules"


def test_every_module_says_what_it_is_for(list_modules: ModuleType) -> None:
    assert [file for file in list_modules.modules() if not list_modules.first_sentence(ROOT / file)] == []


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md"])
def test_links_to_files_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [target for target in targets if not (ROOT / document).parent.joinpath(target).exists()] == []


def test_files_named_in_the_tree_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1].split("```")[1]
    missing: list[str] = []
    folder = ROOT
    for line in filter(None, text.splitlines()):
        names = [word for word in re.split(r"\s{2,}", line.strip())[0].split() if word.endswith(("/", ".py", ".md"))]
        for name in names:
            parent = folder if line.startswith(" ") else ROOT
            missing += [] if (parent / name).exists() else [f"{parent.name}/{name}"]
        if not line.startswith(" ") and names:
            folder = ROOT / names[0]
    assert missing == []


def test_the_readme_asks_what_up_asks() -> None:
    assert f"-d '{json.dumps(QUESTION)}'" in (ROOT / "README.md").read_text(encoding="utf-8")
