"""Background tasks that are remembered until they end, and whose failures are logged, never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pdserve.log import get_logger

logger = get_logger(__name__)


class TaskSet:
    """Keeps a reference to every task it spawned (the event loop alone does not)."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel everything that still runs."""
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task failed", exc_info=error)
