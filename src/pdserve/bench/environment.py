"""What a result must say about where it was measured: hardware, versions, source revision. Never a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("pdserve", "torch", "transformers", "nixl", "triton", "httptools", "uvloop")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, GPUs and operating system of this machine (the client's)."""
    return {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def describe_versions() -> dict[str, str | None]:
    """Versions of the packages that matter for speed; None = not installed."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def source_revision() -> str | None:
    """Git revision of this package's checkout, `-dirty` when it has local changes; None outside of one."""
    folder = Path(__file__).parent
    revision = _run(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    if not revision:
        return None
    return revision + ("-dirty" if _run(["git", "-C", str(folder), "status", "--porcelain", "-uno"]) else "")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _gpus() -> list[str]:
    return _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]).splitlines()
