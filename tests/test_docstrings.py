"""Docstrings and comments cite what exists: files by their names, modules and members by theirs."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("gateway", "prefill_worker", "decode_worker", "operator", "kernels", "src", "benchmarks", "tests")
FILE = re.compile(r"(?<![\w./*{}-])((?:[\w-]+/)*[A-Za-z_][\w-]*\.py)\b")
DOTTED = re.compile(r"`(pdserve(?:\.\w+)+)`")
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`(?!`)")
WORD = re.compile(r"[A-Za-z_]\w*")
OTHER_SOURCES = (".toml", ".yaml", ".yml", ".c", ".h", ".cpp", ".lua")


def python_files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    return [file for file in found if not any(parent.is_symlink() for parent in file.parents)]


@cache
def prose(file: Path) -> tuple[tuple[int, str], ...]:
    """(line, text) of every docstring, those of fields and constants too, and of every comment."""
    return tuple(_read_prose(file))


def _read_prose(file: Path) -> Iterator[tuple[int, str]]:
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def repository() -> frozenset[str]:
    """All ends of paths of Python files here: the whole path, the path in each folder above it, the name alone."""
    paths = [file.relative_to(ROOT) for room in ROOMS for file in python_files(room)]
    return frozenset("/".join(path.parts[index:]) for path in paths for index in range(len(path.parts)))


@cache
def known_names() -> frozenset[str]:
    """Every identifier of the code here, and every word in its strings that are no docstrings."""
    names: set[str] = set()
    for file in (file for room in ROOMS for file in python_files(room)):
        source, documented = file.read_text(encoding="utf-8"), set(prose(file))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        names.update(token.string for token in tokens if token.type == tokenize.NAME)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(WORD.findall(node.value) if (node.lineno, node.value) not in documented else ())
    for file in (file for room in ROOMS for file in (ROOT / room).rglob("*") if file.suffix in OTHER_SOURCES):
        names.update(WORD.findall(file.read_text(encoding="utf-8")))
    return frozenset(names)


def is_known(name: str) -> bool:
    """Whether each part of a cited name occurs in code here, or the whole names something installed."""
    return known_names().issuperset(name.split(".")) or resolves(name)


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or a member of one."""
    parts = name.split(".")
    for num_module_parts in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:num_module_parts]))
        except ImportError:
            continue
        for part in parts[num_module_parts:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@pytest.mark.parametrize("room", ROOMS)
def test_files_that_prose_names_exist(room):
    unknown = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in python_files(room)
        for line, text in prose(file)
        for name in FILE.findall(text)
        if name not in repository()
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize("room", ROOMS)
def test_dotted_names_that_prose_cites_resolve(room):
    cited = {
        name: f"{file.relative_to(ROOT)}:{line} {name}"
        for file in python_files(room)
        for line, text in prose(file)
        for name in DOTTED.findall(text)
    }
    unknown = [place for name, place in cited.items() if not resolves(name)]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize("room", ROOMS)
def test_names_that_prose_cites_occur_in_code(room):
    unknown = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in python_files(room)
        for line, text in prose(file)
        for name in NAME.findall(text)
        if not is_known(name)
    ]
    assert not unknown, "\n".join(unknown)


def test_what_does_not_exist_is_noticed(tmp_path):
    file = tmp_path / "example.py"
    file.write_text('"""See `nowhere/gone.py` and test_docstrings.py."""\nx = 1  # as in gone.py\n')
    names = [name for _, text in prose(file) for name in FILE.findall(text)]
    assert [name for name in names if name not in repository()] == ["nowhere/gone.py", "gone.py"]
    assert is_known("PullRounds.drain")
    assert not is_known("".join(("never", "_written_down")))
    assert resolves("pdserve.transfer.base.Transport.poll")
    assert not resolves("pdserve.transfer.base.Transport.connect_and_wait")
