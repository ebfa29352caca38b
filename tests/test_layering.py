"""Imports point one way: kernels ← engine ← transfer ← workers; gateway and operator stay free of torch.

Two independent proofs: every import statement is read (also those inside functions), and the processes that must
be light are started and looked into.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "pdserve"

FOUNDATION = {
    "addresses",
    "errors",
    "ids",
    "messages",
    "reasons",
    "readiness",
    "sampling_params",
    "registration",
    "log",
    "mailbox",
    "arguments",
}
"""Modules that everybody may import, and that import nobody but each other."""
SHARED = FOUNDATION | {
    "settings",
    "faults",
    "metrics",
    "bus",
    "models",
    "http_protocol",
    "http_server",
    "process",
    "templating",
}
"""Torch-free modules that every process shares."""
ENGINE = {"kernels", "engine"}
WORKERS = SHARED | ENGINE | {"transfer", "worker"}

MAY_IMPORT: dict[str, set[str]] = {
    "settings": FOUNDATION,
    "faults": FOUNDATION,
    "metrics": FOUNDATION | {"bus"},
    "models": FOUNDATION,
    "bus": FOUNDATION | {"faults"},
    "http_protocol": FOUNDATION,
    "http_server": FOUNDATION | {"http_protocol"},
    "process": FOUNDATION | {"faults", "http_server"},
    "templating": FOUNDATION,
    "kernels": FOUNDATION,
    "engine": FOUNDATION | {"kernels", "models", "metrics"},
    "transfer": FOUNDATION | {"models", "metrics", "engine", "kernels"},
    "worker": WORKERS,
    "prefill_worker": WORKERS,
    "decode_worker": WORKERS,
    "gateway": SHARED,
    "operator": SHARED,
}
"""Folder (or module) directly below `pdserve` → those it may import beside itself. Others (cli, commands, local,
bench, verify) stand above all of these."""

ROOMS: dict[str, tuple[str, ...]] = {
    "gateway": ("text", "generation", "observers", "http", "routing", "dispatch", "openai"),
    "engine": ("sequence", "step_output", "fits", "kv", "sampling", "scheduling", "executors"),
    "transfer": ("memory", "base", "descriptor", "digest", "tcp", "nixl", "pulls", "choose"),
    "operator": ("names", "clock", "digest", "facts", "api", "objects", "status", "sizing", "cluster"),
}
"""Package → its rooms (folders or modules), the lowest first: each may import itself and those before it. What is not
named here stands above all rooms, and may import any of them. The operator: plain names and facts, what people ask
for, the objects that it becomes, what is seen of them, decisions; then the API server; reconcile, loop and main."""

TORCH_FREE = ("gateway", "operator", "bus", "settings", "faults", "metrics", "messages", "registration", "local")
HEAVY = {"torch", "transformers"}
NOT_TORCH_FREE = {"models": {"tiny", "gguf"}}
"""Modules that run in processes of their own."""


def files_of(part: str) -> list[Path]:
    """All Python files of a folder or module below `pdserve`; linked folders too."""
    folder, module = PACKAGE / part, PACKAGE / f"{part}.py"
    if folder.is_dir():
        return sorted(file for file in folder.resolve().rglob("*.py"))
    return [module] if module.exists() else []


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import statement in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_imports(part: str) -> Iterator[tuple[str, str]]:
    """(place, imported part) for imports of other parts of pdserve. `__main__.py` is a way in, above all layers."""
    for file in files_of(part):
        if file.name == "__main__.py":
            continue
        for line, name in imports_of(file):
            words = name.split(".")
            if words[0] == "pdserve" and len(words) > 1 and words[1] not in (part, "__version__"):
                yield f"{file.relative_to(ROOT)}:{line} imports {name}", words[1]


@pytest.mark.parametrize("part", sorted({*MAY_IMPORT, *FOUNDATION}))
def test_imports_point_one_way(part: str) -> None:
    allowed = MAY_IMPORT.get(part, FOUNDATION)
    assert [place for place, imported in own_imports(part) if imported not in allowed] == []


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_rooms_of_a_package_import_one_way(package: str) -> None:
    rooms = ROOMS[package]
    assert [room for room in rooms if not files_of(f"{package}/{room}")] == [], "no such rooms"
    found = []
    for index, room in enumerate(rooms):
        for file in files_of(f"{package}/{room}"):
            for line, name in imports_of(file):
                words = name.split(".")
                if words[:2] == ["pdserve", package] and words[2] not in rooms[: index + 1]:
                    found.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert found == []


@pytest.mark.parametrize("part", [*TORCH_FREE, "models"])
def test_no_import_of_torch_where_there_must_be_none(part: str) -> None:
    exempt = NOT_TORCH_FREE.get(part, set())
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files_of(part)
        for line, name in imports_of(file)
        if name.split(".")[0] in HEAVY and file.stem not in exempt
    ]
    assert found == []


def test_the_reader_sees_imports_inside_functions(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import a.b\ndef f():\n    from pdserve.engine import engine\n    import torch\n")
    assert list(imports_of(file)) == [(1, "a.b"), (3, "pdserve.engine.engine"), (4, "torch")]


def test_component_folders_are_no_regular_packages() -> None:
    """An `__init__` in operator/ at the root would shadow the standard library for a Python that starts there."""
    components = ("gateway", "prefill_worker", "decode_worker", "operator", "kernels")
    assert [name for name in components if (ROOT / name / "__init__.py").exists()] == []
    assert [name for name in components if (PACKAGE / name).resolve() != ROOT / name] == []


def light_modules() -> list[str]:
    """The gateway's app, its main, and every module of the operator."""
    folder = PACKAGE / "operator"
    files = [file.relative_to(folder.resolve()).with_suffix("") for file in files_of("operator")]
    operator = [".".join(("pdserve.operator", *file.parts)) for file in files if file.name != "__main__"]
    shared = ["pdserve.models.card", "pdserve.models.resolve", "pdserve.bus.bus", "pdserve.settings", "pdserve.metrics"]
    wanted = ["pdserve.gateway.app", "pdserve.gateway.main", *shared, "pdserve.local.one_machine"]
    return [module for module in wanted if exists(module)] + operator


def exists(module: str) -> bool:
    return find_spec(module) is not None


LIGHT = light_modules()
IMPORT_EACH = """
import importlib, sys

for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sorted({heavy} & set(sys.modules)), flush=True)
"""


@pytest.fixture(scope="module")
def heavy_after() -> dict[str, list[str]]:
    """Light module → heavy ones in memory once it and those before it in the list are imported by one process."""
    code = IMPORT_EACH.format(heavy=repr(HEAVY))
    done = subprocess.run([sys.executable, "-c", code, *LIGHT], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {module: heavy for module, *heavy in lines}


@pytest.mark.parametrize("module", LIGHT)
def test_importing_a_light_module_leaves_torch_out(module: str, heavy_after: dict[str, list[str]]) -> None:
    assert heavy_after[module] == []
