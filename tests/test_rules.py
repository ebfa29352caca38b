"""The rules of the house: sizes, docstrings and words. Each test names the places that break its rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("gateway", "prefill_worker", "decode_worker", "operator", "kernels", "src", "benchmarks", "docs")
MAX_LINES, MAX_ARGUMENTS, MAX_MODULES, MIN_WORDS = 400, 8, 20, 4
PICTURES = re.compile(r"\b(nobody|somebody|whoever|doors?|pumps?|company|seniors?)\b", re.IGNORECASE)
"""Words for which the field has terms, or a sentence a subject."""
INITIALS = re.compile(r"(?<![\w./'\-`])[PD](?![\w/'\-&`+])")
"""Prefill and decode by their first letters alone."""


def files(*folders: str) -> list[Path]:
    """Python files below these folders of the repository; what is linked counts where it lies."""
    found = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return [file for file in found if not any(parent.is_symlink() for parent in file.parents)]


CODE = files(*ROOMS)
TESTS = files("tests")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def place(file: Path, line: int = 0) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def definitions(file: Path) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those of fields and constants too."""
    for node in ast.walk(tree(file)):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, text


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is no docstring: what users may read."""
    known = set(docstrings(file))
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (node.lineno, node.value) not in known:
            yield node.lineno, node.value


def test_no_file_is_longer_than_one_concept_but_schemas():
    sizes = {place(file): len(file.read_text(encoding="utf-8").splitlines()) for file in [*CODE, *TESTS]}
    found = {name: lines for name, lines in sizes.items() if lines > MAX_LINES and "schema" not in name}
    assert not found, found


def test_no_constructor_takes_more_arguments_than_a_reader_keeps_in_mind():
    found = {}
    for file in CODE:
        for node in definitions(file):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                num = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
                if num > MAX_ARGUMENTS:
                    found[place(file, node.lineno)] = num
    assert not found, found


def test_no_folder_has_more_modules_than_a_stranger_overlooks():
    folders: dict[Path, int] = {}
    for file in [*CODE, *TESTS]:
        folders[file.parent] = folders.get(file.parent, 0) + (file.stem not in ("__init__", "__main__"))
    found = {place(folder): num for folder, num in folders.items() if num > MAX_MODULES}
    assert not found, found


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_can_be_read_alone(room):
    bad = []
    for file in files(room):
        for line, text in docstrings(file):
            words = re.findall(r"[\w'’\-]+", text.strip().split("\n\n")[0])
            if len(words) < MIN_WORDS or words[0].lower() in ("of", "as", "for", "from"):
                bad.append(f"{place(file, line)} {text.strip().splitlines()[0]!r}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("room", ROOMS)
def test_terms_of_the_field_stand_instead_of_pictures(room):
    lines = (
        (place(file, number), line)
        for file in files(room)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    )
    found = [f"{where} {line.strip()}" for where, line in lines if PICTURES.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_prefill_and_decode_are_spelled_out_in_what_users_read(room):
    found = [f"{place(file, line)} {text!r}" for file in files(room) for line, text in texts(file)
             if " " in text and INITIALS.search(text)]  # fmt: skip
    assert not found, "\n".join(found)
