"""Every setting that a process accepts is read by it: one that nothing reads would be a promise that is not kept.

The code of a process is what its `main.py` imports, directly or not. A setting counts as read when some module of it,
outside of `pdserve.settings`, takes the attribute of that name from an object that is called settings.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.operator.settings import OperatorSettings
from pdserve.settings import (
    BusSettings,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    SharedSettings,
    known_names,
)
from pdserve.settings.field import not_yet, setting, settings_of
from pdserve.settings.kinds import integer, text
from pdserve.settings.roles import ENVIRONMENT_ONLY

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PROCESSES: dict[type[SharedSettings], str] = {
    GatewaySettings: "pdserve.gateway.main",
    PrefillSettings: "pdserve.prefill_worker.main",
    DecodeSettings: "pdserve.decode_worker.main",
    OperatorSettings: "pdserve.operator.main",
    BusSettings: "pdserve.commands.bus",
}
"""Settings of a process → the module that loads them."""


def file_of(module: str) -> Path | None:
    path = SOURCE.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(parsed(file)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


@functools.cache
def files_behind(module: str) -> frozenset[Path]:
    """The files of pdserve that run when this module does, those of the settings apart."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = file_of(name)
        if file is None or file in found or not name.startswith("pdserve.") or name.startswith("pdserve.settings"):
            continue
        found.add(file)
        waiting += imported_modules(file)
    return frozenset(found)


def attributes_of(tree: ast.AST, owner: str) -> Iterator[str]:
    """Names of the attributes that are taken from a variable or attribute whose name ends so."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=attr) if name.endswith(owner):
                yield attr


def read_names(cls: type[SharedSettings], module: str) -> set[str]:
    """Attributes of the settings that the process reads; behind a property those that the property reads."""
    names = {name for file in files_behind(module) for name in attributes_of(parsed(file), "settings")}
    for name in list(names):
        if isinstance(value := inspect.getattr_static(cls, name, None), property):
            names.update(attributes_of(ast.parse(textwrap.dedent(inspect.getsource(value.fget))), "self"))
    return names


def unread(cls: type[SharedSettings], module: str) -> list[str]:
    read = read_names(cls, module)
    return [
        name for name, (field, about) in settings_of(cls).items() if not about.is_refused and field.name not in read
    ]


@pytest.mark.parametrize("cls", PROCESSES, ids=lambda cls: cls.__name__)
def test_a_process_reads_every_setting_that_it_does_not_refuse(cls: type[SharedSettings]) -> None:
    assert unread(cls, PROCESSES[cls]) == []


@dataclass(frozen=True, kw_only=True)
class Toy(GatewaySettings):
    """A gateway's settings with made-up ones."""

    num_bells: int = setting(1, integer(0), "The gateway rings this many bells.", why="One bell is loud enough.")
    horn_hz: None = not_yet("The gateway hoots.", because="this version is silent; use a bell")
    executor: str = setting("auto", text, "Workers read a setting of this name.", why="A gateway has no executor.")


def test_a_setting_that_nothing_reads_is_found_and_a_refused_one_is_not() -> None:
    assert unread(Toy, PROCESSES[GatewaySettings]) == ["NUM_BELLS", "EXECUTOR"]


def test_what_only_a_property_reads_counts_as_read_where_the_property_is() -> None:
    assert "heartbeat_s" in read_names(GatewaySettings, PROCESSES[GatewaySettings])
    assert "kv_lease_s" in read_names(DecodeSettings, PROCESSES[DecodeSettings])


def test_variables_of_the_environment_that_are_no_setting_are_read_somewhere() -> None:
    folders = (
        "gateway",
        "operator",
        "prefill_worker",
        "decode_worker",
        "kernels",
        "src",
        "tests/cluster",
        "tests/bench",
    )
    texts = [file.read_text(encoding="utf-8") for folder in folders for file in (ROOT / folder).rglob("*.py")]
    unread_names = [name for name in ENVIRONMENT_ONLY if not any(f'"PDS_{name}"' in text for text in texts)]
    assert unread_names == ["CONFIG"], "that one is read by `load` itself"
    assert known_names() >= ENVIRONMENT_ONLY.keys()


# --- defaults


def number_of(node: ast.expr) -> float | None:
    """The value of a number, or of a product of numbers, as it stands in the code."""
    parts = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
    if not all(isinstance(part, parts) for part in ast.walk(node)):
        return None
    value = eval(ast.unparse(node), {"__builtins__": {}})
    return value if type(value) in (int, float) else None


def defaults_in(tree: ast.AST) -> Iterator[tuple[int, str, float]]:
    """(line, name, number) of every argument and every annotated field whose default is written as a number."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pairs = [(name, value)]
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                positional = [*args.posonlyargs, *args.args]
                last = positional[len(positional) - len(args.defaults) :]
                pairs = [(arg.arg, default) for arg, default in zip(last, args.defaults, strict=True)]
                pairs += [(arg.arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        for name, default in pairs:
            if default is not None and (number := number_of(default)) is not None:
                yield default.lineno, name, number


OTHER_MATTERS = {("transfer", "drain_s"): "the time that READs have to end, not that of a process"}
"""(folder, argument) that shares a setting's name by chance."""


def second_defaults(file: Path) -> list[str]:
    """Places where a number stands for a setting's default and is another one; 0 stands for "any" or "off"."""
    known: dict[str, set[object]] = {}
    for cls in PROCESSES:
        for field, about in settings_of(cls).values():
            if not about.is_refused:
                known.setdefault(field.name, set()).add(field.default)
    return [
        f"{file.name}:{line} {name} = {number:g}, the setting has {sorted(map(str, known[name]))}"
        for line, name, number in defaults_in(parsed(file))
        if name in known
        and number not in {0, *known[name]}
        and not any((folder, name) in OTHER_MATTERS for folder in file.parts)
    ]


def test_a_number_below_a_constructor_is_no_second_default_of_a_setting() -> None:
    folders = ("gateway", "prefill_worker", "decode_worker", "src/pdserve")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    files = [file for file in files if (SOURCE / "pdserve" / "settings") not in file.parents]
    assert len(files) > 200
    assert [place for file in files for place in second_defaults(file)] == []


def test_a_second_default_is_found_where_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "limits.py"
    file.write_text(
        "class L:\n    max_attempts: int = 5\n    block_size: int = 16\n"
        "def f(max_body_bytes=8 * 1024, *, heartbeat_s=1.0, kv_lease_s=-1): ...\n"
    )
    found = {place.split(" =")[0] for place in second_defaults(file)}
    assert found == {"limits.py:2 max_attempts", "limits.py:4 max_body_bytes", "limits.py:4 kv_lease_s"}
