"""The eight steps of docs/architecture.md are those that the files themselves tell."""

from __future__ import annotations

import ast
import re

import pytest

from .documents import ROOT

SECTION = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## One request in eight steps")[1]
STEPS = {
    int(number): re.findall(r"\*\*([\w/]+\.py)\*\*", text)
    for number, text in re.findall(r"^(\d)\. (.*?)(?=^\d\. |^$)", SECTION, flags=re.MULTILINE | re.DOTALL)
}


def test_there_are_eight_steps_each_with_its_file() -> None:
    assert list(STEPS) == list(range(1, 9))
    assert [file for files in STEPS.values() for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("number", range(1, 9))
def test_a_files_own_step_is_the_one_of_the_page(number: int) -> None:
    file = STEPS[number][0]
    docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    assert re.findall(r"[Ss]tep (\d) of 8", docstring) == [str(number)], f"{file} does not say: Step {number} of 8"
