"""A device whose graphs are real: operations are recorded once and repeated on the same memory, as CUDA graphs do.

Python does not run again at a replay, so numbers that a step reads outside its buffers stay as they were when it was
captured, and the tests see it. Waiting for the device during a capture is an error, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from pdserve.engine.executors.cuda.device import HostDevice

_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in _WAITS, f"{func} waits for the device during a capture"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class RecordedDevice(HostDevice):
    """The CPU with graphs."""

    num_captures = 0

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        body()
        with _Recorder() as recorder:
            body()
        return lambda: _replay(recorder.operations)


def _replay(operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]) -> None:
    values: dict[int, Any] = {}

    def current(value: Any) -> Any:
        return values.get(id(value), value) if isinstance(value, torch.Tensor) else value

    for func, args, kwargs, recorded in operations:
        result = func(*tree_map(current, args), **tree_map(current, kwargs))
        recorded_parts, parts = ((r,) if isinstance(r, torch.Tensor) else tuple(r or ()) for r in (recorded, result))
        for then, now in zip(recorded_parts, parts, strict=True):
            values[id(then)] = now
