"""Kernels under Triton's interpreter, which is switched on before Triton is imported: in another process."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tolerances.py, paged.py

CHILD = Path(__file__).with_name("interpreter_child.py")


class KernelError(Exception):
    """What a launcher raised in the other process."""


class Interpreter:
    """Calls launchers in the child; tensors that they write are written here too."""

    def __init__(self) -> None:
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def call(self, module: str, function: str, *args: Any, **kwargs: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        buffer = io.BytesIO()
        torch.save({"module": module, "function": function, "args": args, "kwargs": kwargs}, buffer)
        self._child.stdin.write(len(buffer.getvalue()).to_bytes(8, "little") + buffer.getvalue())
        self._child.stdin.flush()
        size = int.from_bytes(self._child.stdout.read(8), "little")
        reply = torch.load(io.BytesIO(self._child.stdout.read(size)), weights_only=True)
        if "error" in reply:
            raise KernelError(reply["error"])
        for mine, other in zip(args, reply["args"], strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(other)
        return reply["result"]

    def close(self) -> None:
        self._child.communicate(timeout=20)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """The child process; takes the place of a GPU."""
    child = Interpreter()
    yield child
    child.close()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, interpreter: Interpreter) -> Callable[..., Any]:
    """The launcher after which the test's module is named, or another one of it, interpreted."""
    module = request.node.path.stem.removeprefix("test_")

    def call(*args: Any, function: str = module, **kwargs: Any) -> Any:
        return interpreter.call(module, function, *args, **kwargs)

    return call
