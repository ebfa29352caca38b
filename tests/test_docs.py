"""The documentation that can be checked is."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.commands.up import QUESTION

ROOT = Path(__file__).parent.parent


PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
SCRIPTS = ("list_modules", "list_settings", "list_metrics", "list_request_fields", "list_model_folders")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of docs/ by name; `make docs` runs the same ones."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_that_is_made_from_the_code_is_up_to_date(name: str, script: Callable[[str], ModuleType]) -> None:
    module = script(name)
    document = module.DOCUMENT.read_text(encoding="utf-8")
    assert document == module.updated(document), "run: make docs"


def test_a_page_without_the_part_that_is_made_is_an_error(script: Callable[[str], ModuleType]) -> None:
    assert script("generated").with_part("<!-- a -->\nold<!-- /a -->", "a", "new") == "<!-- a -->\n\nnew\n\n<!-- /a -->"
    with pytest.raises(ValueError, match="0 parts <!-- b -->"):
        script("generated").with_part("<!-- a -->\nold<!-- /a -->", "b", "new")


def test_every_module_says_what_it_is_for(script: Callable[[str], ModuleType]) -> None:
    module = script("list_modules")
    assert [file for file in module.modules() if not module.first_sentence(ROOT / file)] == []


def test_every_module_is_listed_once_and_every_folder_has_one_heading(script: Callable[[str], ModuleType]) -> None:
    module = script("list_modules")
    headings = [line for line in module.listing().splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings)) > 20
    listed = list(module.modules())
    written = {path.resolve() for folder in module.FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert len(listed) == len({(ROOT / path).resolve() for path in listed})
    assert {(ROOT / path).resolve() for path in listed} == {path for path in written if path.name != "__main__.py"}


@pytest.mark.parametrize("document", PAGES)
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
