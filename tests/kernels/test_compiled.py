"""The kernels' machine code for GPUs that are not here, and the table of it in docs/kernels.md."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from pdserve.kernels.catalog import DTYPES, HEAD_DIMS, cases

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in cases()}
SAMPLE = ["paged_decode_attention/bf16-d128", "paged_prefill_attention/bf16-d64", "block_digest/2-MiB-blocks"]
"""Compiled in every run; all the others in the slow ones."""
REST = [name for name in CASES if name not in SAMPLE]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


list_kernels = _load(ROOT / "docs" / "list_kernels.py")
TABLE = list_kernels.DOCUMENT.read_text(encoding="utf-8").split("<!-- kernels -->")[1].splitlines()


def _check(rows: list[dict[str, Any]], names: list[str]) -> None:
    assert {(row["case"], row["arch"]) for row in rows} == {(name, arch) for name in names for arch in (80, 90)}
    for row in rows:
        case = CASES[row["case"]]
        assert row["spills"] == 0, row
        assert row["registers"] <= case.max_registers, row
        if row["kernel"] != "merge_splits_kernel":
            assert (row["tensor_core_instructions"] > 0) is case.has_tensor_cores, row
            assert (row["async_copies"] >= 8) is case.has_async_copies, row
    if f"Triton {triton.__version__}." in TABLE:
        assert [line for row in rows if (line := list_kernels.line(row)) not in TABLE] == [], "docs/list_kernels.py"


@pytest.fixture(scope="module")
def sample() -> list[dict[str, Any]]:
    """What the compiler says of the sample: one process, for its start takes longer than a kernel."""
    return list(list_kernels.compiled(SAMPLE))


@pytest.mark.parametrize("name", SAMPLE)
def test_no_register_is_spilled_and_the_table_is_true(name, sample):
    _check([row for row in sample if row["case"] == name], [name])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_register_is_spilled_in_any_kernel_and_the_whole_table_is_true():
    _check(list(list_kernels.compiled(REST)), REST)


def test_the_table_has_a_line_for_every_call_and_gpu_and_no_others():
    lines = [line.split("|") for line in TABLE if line.startswith("| ") and "/" in line]
    listed = {(columns[1].strip(), columns[3].strip()) for columns in lines}
    assert listed == {(name, arch) for name in CASES for arch in ("80", "90")}
    assert all(columns[5].strip() == "0" for columns in lines), "spills"


def test_every_kernel_has_a_twin_a_test_a_benchmark_and_a_place_in_the_catalogue():
    files = {file.stem for file in (ROOT / "kernels").glob("*.py") if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert files == {case.module for case in CASES.values()}
    twins = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "kernels" / "reference").glob("*.py"))
    for name in files:
        assert f"\ndef {name}(" in twins
        assert (ROOT / "tests" / "kernels" / f"test_{name}.py").exists()
        assert (ROOT / "benchmarks" / "kernels" / f"{name}.py").exists()


def test_attention_is_compiled_for_every_head_dimension_in_both_half_precisions():
    for module in ("paged_decode_attention", "paged_prefill_attention"):
        expected = {f"{module}/{dtype}-d{size}" for dtype in DTYPES if dtype != "fp32" for size in HEAD_DIMS}
        assert expected <= CASES.keys()


def test_nothing_is_compiled_under_the_interpreter():
    command = [sys.executable, "-m", "pdserve.kernels.compile_only", SAMPLE[0]]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr
