"""What the CUDA executor asks of a device, and the two devices that answer: a GPU, and the CPU in its place.

Everything of the executor that is no kernel runs on both, so that tests without a GPU see the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Device(Protocol):
    """Memory, order and graphs of one device."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 host memory from which copies to the device run by themselves."""
        ...

    def synchronize(self) -> None:
        """Return when all that was launched is done.

        Raises:
            RuntimeError: the device failed.
        """
        ...

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` as often as it takes to warm it up, and return what repeats its work on the device.

        The body reads and writes only memory that outlives it, and never waits for the device.
        """
        ...

    def free_bytes(self) -> int:
        """Bytes of the device's memory that no process has taken."""
        ...


class CudaDevice:
    """An NVIDIA GPU. Graphs share one memory pool: capture the largest first."""

    _NUM_WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device.index or 0)
        self._pool: Any = None

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory, zeroed uint8 `[num_bytes]`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        """Wait until all streams of the GPU are done."""
        torch.cuda.synchronize(self.device)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph. Kernels are compiled during the warm-up, on a stream of its own as torch asks for."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(self._NUM_WARM_UPS):
                body()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads of this process may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body()
        self._pool = graph.pool()
        return graph.replay

    def free_bytes(self) -> int:
        """What the driver has left."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)


class HostDevice:
    """The CPU: everything is done at once, and a captured body is simply run again."""

    device = torch.device("cpu")

    def pinned(self, num_bytes: int) -> Tensor:
        """Ordinary host memory, zeroed uint8 `[num_bytes]`."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """The body itself, run once as a warm-up."""
        body()
        return body

    def free_bytes(self) -> int:
        """A number that bounds nothing: a host has enough memory."""
        return 1 << 62
