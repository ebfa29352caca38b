"""`pdserve doctor [--model M] [--json]`: what works on this machine, what will be used, and why.

Everything is tried and not guessed: a server is started, a transport is opened, memory of another process is read.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from pdserve import __version__
from pdserve.arguments import CommandParser
from pdserve.errors import PdserveError
from pdserve.local.ports import is_free
from pdserve.local.redis_server import RedisServer, find_server_binary
from pdserve.models.demo import INSTALL_COMMAND, find_demo_gguf
from pdserve.models.resolve import home_folder, resolve_model
from pdserve.transfer.nixl.cma import can_read

_OLDEST_CAPABILITY = 80
"""Compute capability of the first GPUs with bfloat16 and asynchronous copies."""


@dataclass(frozen=True)
class Finding:
    """One line: `ok` works, `note` costs something at most, `bad` keeps `pdserve up` from running."""

    name: str
    verdict: str
    text: str


def main(argv: list[str]) -> int:
    """Print the findings; 1 when one of them is bad."""
    parser = CommandParser(prog="pdserve doctor", description="What works here, what will be used and why.")
    parser.add_argument("--model", default="demo", help="the model to choose an executor for")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    findings = []
    for finding in findings_for(options.model):
        findings.append(finding)
        if not options.json:
            print(f"{finding.verdict:<5} {finding.name:<12} {finding.text}", flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.verdict == "bad" for finding in findings))


def findings_for(model: str) -> Iterator[Finding]:
    """One after the other, as they are found; the slow ones last."""
    yield python()
    yield machine()
    yield home()
    yield port(8000)
    yield bus()
    yield demo_model()
    yield cross_memory_attach()
    yield compiler()
    yield cpu_kernels()
    yield torch_and_gpu()
    yield cuda_executor()
    yield executor(model)
    yield transport()


def python() -> Finding:
    """The Python interpreter, its platform and the version of pdserve."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, pdserve {__version__}"
    return Finding("python", "ok" if sys.version_info >= (3, 11) else "bad", text)


def machine() -> Finding:
    """Cores that this process may use, and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    return Finding("machine", "ok", f"{cores} cores, {memory.available >> 20} of {memory.total >> 20} MiB memory free")


def home() -> Finding:
    """Where models are kept, and how much fits there."""
    folder = home_folder(os.environ)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Finding("home", "bad", f"{folder} cannot be written: set PDS_HOME to a folder that can")
    return Finding("home", "ok" if free_bytes > 2 << 30 else "note", f"{folder}, {free_bytes >> 20} MiB free")


def port(number: int) -> Finding:
    """Whether the default port of the API is free."""
    if is_free("127.0.0.1", number):
        return Finding("port", "ok", f"{number} is free")
    return Finding("port", "note", f"{number} is taken: pdserve up --port 0 takes any free one")


def bus() -> Finding:
    """Starts and stops the embedded Redis-compatible server."""
    try:
        with RedisServer():
            return Finding("bus", "ok", f"embedded server starts ({find_server_binary()})")
    except PdserveError as error:
        return Finding("bus", "bad", f"{error}; or name one: pdserve up --redis URL")


def demo_model() -> Finding:
    """Whether `--model demo` can be served."""
    try:
        return Finding("demo model", "ok", str(find_demo_gguf()))
    except PdserveError:
        return Finding("demo model", "note", f"package not installed: {INSTALL_COMMAND}; --model tiny needs nothing")


_SHOWS_ITS_MEMORY = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
buffer = ctypes.create_string_buffer(sys.argv[1].encode())
print(os.getpid(), ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""


def cross_memory_attach() -> Finding:
    """Reads another process's memory, as NIXL does between workers of one machine."""
    shown = "pdserve doctor"
    command = [sys.executable, "-P", "-c", _SHOWS_ITS_MEMORY, shown]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        words = child.stdout.readline().split()
        works = len(words) == 2 and can_read(int(words[0]), int(words[1]), shown.encode())
        child.stdin.close()
    if works:
        return Finding("memory", "ok", "cross-memory attach works: KV blocks are read straight from the other process")
    return Finding("memory", "note", "cross-memory attach is not permitted here: KV blocks travel over tcp")


def compiler() -> Finding:
    """Only needed when the package is built."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found:
        return Finding("compiler", "ok", found)
    return Finding("compiler", "note", "no C++ compiler: CPU kernels cannot be built here")


def cpu_kernels() -> Finding:
    """The compiled kernels of the cpu executor."""
    from pdserve.kernels.cpu import ops as cpu_ops  # noqa: PLC0415  optional

    obstacle = cpu_ops.why_unavailable()
    if obstacle:
        return Finding("cpu kernels", "note", f"{obstacle}; the slower transformers executor serves instead")
    return Finding("cpu kernels", "ok", f"compiled, {cpu_ops.CpuContext(1).isa} on this processor")


def torch_and_gpu() -> Finding:
    """The tensor library and what it sees."""
    import torch  # noqa: PLC0415  seconds

    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "triton", "nixl"))
    if not torch.cuda.is_available():
        return Finding("torch", "ok", f"{packages}; no GPU, the CPU serves")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding("torch", "ok", f"{packages}; {names}")


def cuda_executor() -> Finding:
    """Whether EXECUTOR=cuda can run."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        remedy = "EXECUTOR=triton-interpreter tries its kernels on the CPU, slowly"
        return Finding("cuda", "note", f"torch {torch.__version__} sees no CUDA GPU, EXECUTOR=cuda needs one; {remedy}")
    if _version("triton") == "not installed":
        return Finding("cuda", "bad", "a GPU but no Triton: pip install triton, or set EXECUTOR=transformers")
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    if int(capability) < _OLDEST_CAPABILITY:
        return Finding("cuda", "note", f"sm_{capability} is older than the kernels are compiled for (sm_80 and newer)")
    return Finding("cuda", "ok", f"Triton kernels for sm_{capability}")


def executor(model: str) -> Finding:
    """Which executor `auto` means for this model. A model that would have to be made first is not made here."""
    import torch  # noqa: PLC0415

    from pdserve.engine.loader import choose_executor  # noqa: PLC0415

    try:
        folder = resolve_model(model, home_folder(os.environ), _refuse)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        choice = choose_executor(folder, "auto", device)
    except _NotMadeYetError:
        return Finding("executor", "ok", f"chosen when {model} has been made; the first `pdserve up` does it")
    except PdserveError as error:
        return Finding("executor", "bad", str(error))
    return Finding("executor", "ok", f"{choice.name} for {model}: {choice.reason}")


class _NotMadeYetError(Exception):
    """A model's progress line was about to be told."""


def _refuse(_: str) -> None:
    raise _NotMadeYetError


def transport() -> Finding:
    """Opens the transports that TRANSPORT=auto would use."""
    from pdserve.transfer.choose import usable_transports  # noqa: PLC0415  brings torch

    try:
        usable: list[Any] = list(usable_transports("auto"))
    except PdserveError as error:
        return Finding("transport", "bad", str(error))
    names = [opened.name for opened in usable]
    for opened in usable:
        opened.close()
    if "nixl" in names:
        return Finding("transport", "ok", "nixl where its READs are one-sided, else tcp")
    return Finding("transport", "note", "tcp: NIXL does not work here")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
