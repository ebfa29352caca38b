"""A worker's inbox: one stream per generation, never reused, read by one reader at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.messages import AnyMessage
from pdserve.registration import WorkerRef


class Inbox:
    """Reads what others send to this worker's current generation."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader: StreamReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._past_disconnected_s = 0.0
        self._ended = asyncio.Event()

    @property
    def disconnected_s(self) -> float:
        """How long, in all, no message could arrive: KV leases stand still for as long."""
        return self._past_disconnected_s + (self._reader.disconnected_s if self._reader is not None else 0.0)

    def open(self, ref: WorkerRef, handler: Callable[[AnyMessage], None]) -> None:
        """Read the inbox of this generation; another one is closed."""
        self.close()
        self._reader = StreamReader(self._bus, self._bus.keys.inbox(*ref), handler)
        self._task = asyncio.get_running_loop().create_task(self._reader.run(), name=f"inbox {ref}")
        self._task.add_done_callback(lambda task: None if task.cancelled() else self._ended.set())

    async def wait_for_end(self) -> None:
        """Return, or raise, when a reader has ended that was not closed, which is a defect."""
        await self._ended.wait()
        if self._task is not None and self._task.done():
            self._task.result()

    def close(self) -> None:
        """Stop reading; what comes later waits on the bus."""
        self._past_disconnected_s = self.disconnected_s
        if self._task is not None:
            self._task.cancel()
        self._reader = self._task = None
