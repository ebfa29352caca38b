"""The library as a whole: what is found, chosen and refused."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.kernels.cpu import ops as cpu_ops

REPOSITORY = Path(__file__).parents[2]
_ENV = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
"""With the compiler that Python was built with, or none."""
needs_kernels = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))


def test_switched_off_kernels_say_which_setting_did_it(monkeypatch):
    monkeypatch.setenv("PDS_CPU_KERNELS", "off")
    assert cpu_ops.why_unavailable() == "PDS_CPU_KERNELS=off"


def test_a_missing_library_is_told_as_such(monkeypatch):
    monkeypatch.delenv("PDS_CPU_KERNELS", raising=False)
    monkeypatch.setattr(cpu_ops, "_library_path", lambda: None)
    assert "without a C++ compiler" in str(cpu_ops.why_unavailable())


@needs_kernels
def test_the_best_instruction_set_is_taken_unless_another_is_asked_for():
    best = cpu_ops.load_library().pds_best_isa().decode()
    assert cpu_ops.CpuContext(1).isa == best
    assert cpu_ops.CpuContext(2, "portable").isa == "portable"


@needs_kernels
def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(RuntimeError, match="sse9"):
        cpu_ops.CpuContext(1, "sse9")


@needs_kernels
def test_weights_are_packed_in_pairs_only_where_pairs_are_multiplied():
    kinds = [cpu_ops.F32, cpu_ops.BF16, cpu_ops.I8]
    assert [cpu_ops.CpuContext(1, "portable").packed_type(kind) for kind in kinds] == kinds
    best = cpu_ops.CpuContext(1)
    pairs = [cpu_ops.F32, cpu_ops.BF16_PAIRS, cpu_ops.I8_PAIRS]
    assert [best.packed_type(kind) for kind in kinds] == (pairs if best.isa == "avx512_bf16" else kinds)


@needs_kernels
def test_machine_limits_are_measured():
    context = cpu_ops.CpuContext(2)
    assert context.fma_gflops(100_000) > 0.1
    assert context.fma_gflops(100_000, context.packed_type(cpu_ops.BF16)) > 0.1
    data = (ctypes.c_float * 100_000)()
    assert context.read_gb_per_s(ctypes.addressof(data), len(data)) > 0.01


def test_structures_have_the_fields_of_the_c_header_in_its_order():
    header = (REPOSITORY / "kernels" / "cpu" / "api.h").read_text()
    for name, mirror in (("Matrix", cpu_ops.Matrix), ("Layer", cpu_ops.Layer), ("Batch", cpu_ops.Batch)):
        body = re.search(rf"struct Pds{name} \{{(.*?)\n\}};", header, re.DOTALL)
        assert body is not None
        without_comments = re.sub(r"//[^\n]*", "", body[1])
        fields = [
            part.split()[-1].lstrip("*")
            for declaration in without_comments.split(";")
            if declaration.strip()
            for part in declaration.split(",")
        ]
        assert fields == [field[0] for field in mirror._fields_]


@pytest.mark.parametrize("compiler", ["present", "absent"])
def test_a_build_succeeds_with_and_without_a_compiler(tmp_path, compiler):
    if compiler == "present" and shutil.which("g++") is None:
        pytest.skip("no g++ here")
    tree = tmp_path / "tree"
    shutil.copytree(REPOSITORY / "kernels", tree / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(REPOSITORY / "setup.py", tree)
    script = "import setup" if compiler == "absent" else _ONE_SMALL_SOURCE
    env = {**_ENV, "CC": "no-such-compiler", "CXX": "no-such-compiler"} if compiler == "absent" else _ENV
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, "build_ext", "--build-lib", str(tmp_path / "lib")],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert bool(list((tmp_path / "lib").rglob("_cpu_kernels*.so"))) == (compiler == "present")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@pytest.mark.parametrize("knows_bf16", [True, False])
def test_a_compiler_without_bf16_products_builds_the_rest(tmp_path, knows_bf16):
    tree = tmp_path / "tree"
    (tree / "kernels" / "cpu").mkdir(parents=True)
    shutil.copy(REPOSITORY / "setup.py", tree)
    for source in (REPOSITORY / "kernels" / "cpu").glob("*.cpp"):  # whole sources take long to compile
        (tree / "kernels" / "cpu" / source.name).write_text(_names_itself(source.stem))
    if not knows_bf16:
        (tree / "kernels" / "cpu" / "step_avx512_bf16.cpp").write_text("#error unknown instructions")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")],
        cwd=tree,
        env=_ENV,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (library,) = (tmp_path / "lib").rglob("_cpu_kernels*.so")
    exported = ctypes.CDLL(str(library))
    assert hasattr(exported, "step_avx512")
    assert hasattr(exported, "step_avx512_bf16") == hasattr(exported, "api_has_bf16") == knows_bf16


def _names_itself(stem: str) -> str:
    """A source that exports its name, and whether it was told that there are bf16 products."""
    visible = '__attribute__((visibility("default"))) void'
    told = f'\n#ifdef PDS_HAS_AVX512_BF16\nextern "C" {visible} {stem}_has_bf16() {{}}\n#endif\n'
    return f'extern "C" {visible} {stem}() {{}}{told}'


_ONE_SMALL_SOURCE = """
import pathlib
for source in pathlib.Path("kernels/cpu").glob("*.cpp"):
    if source.name != "pack.cpp":
        source.unlink()
import setup
"""
"""The whole library takes long to compile; one of its sources shows that compiling and linking work."""
