"""Which service is looked at next, and when. A service is never looked at twice at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

Key = tuple[str, str]
"""A service's namespace and name."""


class WorkQueue:
    """Due times by key; earlier ones win. On one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_s: dict[Key, float] = {}
        self._running: set[Key] = set()
        self._changed = asyncio.Condition()

    async def add(self, key: Key, delay_s: float = 0.0) -> None:
        """Look at a service after a delay, or sooner when that was asked for already."""
        due_s = self._clock() + delay_s
        async with self._changed:
            self._due_s[key] = min(due_s, self._due_s.get(key, due_s))
            self._changed.notify_all()

    async def take(self) -> Key:
        """Wait for the next service; `done` must follow."""
        async with self._changed:
            while True:
                ready = [key for key in self._due_s if key not in self._running]
                key = min(ready, key=self._due_s.__getitem__, default=None)
                wait_s = None if key is None else self._due_s[key] - self._clock()
                if key is not None and wait_s is not None and wait_s <= 0:
                    del self._due_s[key]
                    self._running.add(key)
                    return key
                await self._wait(wait_s)

    async def done(self, key: Key) -> None:
        """Others may look at this service again."""
        async with self._changed:
            self._running.discard(key)
            self._changed.notify_all()

    async def _wait(self, timeout_s: float | None) -> None:
        # Not asyncio.wait_for: what is cancelled in there may go on in a task of its own, and keep the lock for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
