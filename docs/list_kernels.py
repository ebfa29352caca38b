"""Rewrites the table in kernels.md: what every Triton kernel compiles to. `python docs/list_kernels.py` (minutes)

Tests compare its lines with what the compiler says now.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from pdserve.kernels.catalog import cases

DOCUMENT = Path(__file__).with_name("kernels.md")
_SECTION = re.compile(r"(<!-- kernels -->\n).*?(<!-- /kernels -->)", re.DOTALL)
_HEAD = """\
Triton {version}.

| call | kernel | sm | registers | spills | shared memory, bytes | tensor-core instructions | async copies | instructions | interpreter |
|---|---|---:|---:|---:|---:|---:|---:|---:|---|
"""  # noqa: E501


def compiled(names: list[str]) -> Iterator[dict[str, Any]]:
    """What the compiler says of these calls, for every GPU; compiled in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "pdserve.kernels.compile_only", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr)
    yield from (json.loads(line) for line in done.stdout.splitlines())


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    interpreter = {case.name: case.interpreter for case in cases()}[row["case"]]
    columns = ("arch", "registers", "spills", "shared_bytes", "tensor_core_instructions", "async_copies")
    numbers = " | ".join(str(row[column]) for column in (*columns, "num_instructions"))
    return f"| {row['case']} | {row['kernel']} | {numbers} | {interpreter} |"


def updated(document: str) -> str:
    """The document with the table as it should be."""
    lines = "\n".join(line(row) for row in compiled([]))
    table = _HEAD.format(version=triton.__version__) + lines
    return _SECTION.sub(lambda match: f"{match[1]}{table}\n{match[2]}", document)


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
