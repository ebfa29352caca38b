"""Runs with TRITON_INTERPRET=1 in a process of its own: calls launchers by name; tensors come and go on pipes."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import torch


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    while header := source.read(8):
        call = torch.load(io.BytesIO(source.read(int.from_bytes(header, "little"))), weights_only=True)
        reply = io.BytesIO()
        torch.save(answer(call), reply)
        sink.write(len(reply.getvalue()).to_bytes(8, "little") + reply.getvalue())
        sink.flush()


def answer(call: dict[str, Any]) -> dict[str, Any]:
    """The result, and the arguments as the kernel left them; or the error as text."""
    try:
        function = getattr(importlib.import_module(f"pdserve.kernels.{call['module']}"), call["function"])
        result = function(*call["args"], **call["kwargs"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"result": result, "args": call["args"]}


if __name__ == "__main__":
    main()
