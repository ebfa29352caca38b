"""Compiles the kernels for GPUs that are not here, and reads what became of them: registers, spills, instructions.

`python -m pdserve.kernels.compile_only [CASE …] [--arch 80 90]` prints one JSON object per kernel and GPU. It runs in
a process of its own, never under TRITON_INTERPRET. Triton keeps what it compiled (TRITON_CACHE_DIR).

Each launcher is called as it would be for a real launch; what it would launch is recorded and compiled with the same
specialisation of its arguments: multiples of 16 and aligned pointers are told to the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pdserve.kernels.catalog import KernelCase, cases

ARCHS = (80, 90)
"""Compute capabilities: Ampere (A100) and Hopper (H100, H200)."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_PATTERNS = {
    "tensor_core_instructions": r"\b(?:HMMA|HGMMA|WGMMA)\b",
    "async_copies": r"\b(?:LDGSTS|UTMALDG)\b",
    "spills": r"\b(?:STL|LDL)\b",
}


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel's machine code, counted."""

    case: str
    kernel: str
    arch: int
    registers: int
    spills: int
    """Instructions that store to or load from local memory."""
    shared_bytes: int
    tensor_core_instructions: int
    async_copies: int
    num_instructions: int


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: JITFunction[Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def compile_case(case: KernelCase, arch: int) -> list[CompiledKernel]:
    """Everything that one call launches, compiled for `sm_<arch>`."""
    return [_compile(case, launch, arch) for launch in record_launches(case, arch)]


def record_launches(case: KernelCase, arch: int) -> list[_Launch]:
    """What the case's launcher would launch on that GPU."""
    module = importlib.import_module(f"pdserve.kernels.{case.module}")
    launches: list[_Launch] = []
    with _recording(module, launches, arch):
        case.call()
    return launches


@contextmanager
def _recording(module: Any, launches: list[_Launch], arch: int) -> Iterator[None]:
    """Every kernel of the module records its launches instead, and the launcher believes in the GPU."""
    before = {name: found for name, found in vars(module).items() if isinstance(found, JITFunction)}
    replaced: dict[str, Any] = {name: _Recorder(kernel, launches) for name, kernel in before.items()}
    if hasattr(module, "capability"):
        before["capability"] = module.capability
        replaced["capability"] = lambda device: arch
    vars(module).update(replaced)
    try:
        yield
    finally:
        vars(module).update(before)


class _Recorder:
    """Stands where a kernel stood; `recorder[grid](…)` is remembered."""

    def __init__(self, kernel: JITFunction[Any], launches: list[_Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid), grid
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        self._launches.append(_Launch(self._kernel, arguments, options))


def _compile(case: KernelCase, launch: _Launch, arch: int) -> CompiledKernel:
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False))
    values |= {name: launch.options[name] for name in names if name in launch.options}
    assert list(values) == names, f"{case.name} is launched with {list(values)}, not {names}"
    signature, constants, attributes = {}, {}, {}
    for index, (name, param) in enumerate(zip(names, launch.kernel.params, strict=True)):
        value, is_specialised = values[name], not param.do_not_specialize
        if param.is_constexpr or (isinstance(value, int) and value == 1 and is_specialised):
            signature[name] = "constexpr"
            constants[index,] = value
            continue
        signature[name] = _type_of(value)
        is_multiple = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_multiple and is_specialised and not param.do_not_specialize_on_alignment:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: value for name, value in launch.options.items() if name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, code = _disassemble(compiled.asm["cubin"])
    counts = {name: len(re.findall(pattern, code)) for name, pattern in _PATTERNS.items()}
    return CompiledKernel(
        case=case.name,
        kernel=launch.kernel.__name__,
        arch=arch,
        registers=registers,
        shared_bytes=int(compiled.metadata.shared),
        num_instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
        **counts,
    )


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _disassemble(cubin: bytes) -> tuple[int, str]:
    """The number of registers of a thread, and the instructions as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), code


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Print what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("case", nargs="*", help="names from the catalogue; none: all")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS))
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: what is interpreted is not compiled")
    wanted = [case for case in cases() if not options.case or case.name in options.case]
    unknown = set(options.case) - {case.name for case in wanted}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    for case in wanted:
        for arch in options.arch:
            for compiled in compile_case(case, arch):
                print(json.dumps(asdict(compiled)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
