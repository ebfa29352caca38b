"""Keeps a service's processes running on one machine, and stops them together. Knows no setting and no bus."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.local.child import Child, backoff_s
from pdserve.local.plan import ChildSpec

Report = Callable[[str, str], None]
"""(who, what): one progress line."""


class Supervisor:
    """Children of one service, each with a life of its own; the first that is given up at its start ends all."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        log_folder: Path,
        report: Report,
        on_change: Callable[[], None] = lambda: None,
        restarts: bool = True,
        is_verbose: bool = False,
        stop_timeout_s: float = 10.0,
        backoff: Callable[[int], float] = backoff_s,
    ) -> None:
        self._report, self._stop_timeout_s = report, stop_timeout_s
        self.children = [
            Child(
                spec,
                log_folder=log_folder,
                report=report,
                on_change=on_change,
                restarts=restarts,
                is_verbose=is_verbose,
                backoff=backoff,
            )
            for spec in specs
        ]
        self._stop_requested = asyncio.Event()
        self._killed = False

    def request_stop(self) -> None:
        """Ask for the end; asked again, children that are still there are killed. Safe in a signal handler."""
        if self._stop_requested.is_set():
            self._killed = True
            self._signal_all(signal.SIGKILL)
        else:
            self._report("up", "stopping; Ctrl-C again kills what is left")
        self._stop_requested.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Run until `request_stop`; `on_ready` is called once, when all children are ready.

        Raises:
            ServiceError: a child was given up before it was ever ready. The others have been stopped.
        """
        lives = [asyncio.create_task(child.run(), name=child.spec.id) for child in self.children]
        announce = asyncio.create_task(self._announce(on_ready))
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            await self._until_stop_or_failure(lives, stop)
        finally:
            announce.cancel()
            stop.cancel()
            await self._stop(lives)
        for life in lives:
            life.result()

    async def _until_stop_or_failure(self, lives: list[asyncio.Task[None]], stop: asyncio.Task[bool]) -> None:
        """A life that ends without an error was not to be restarted: the others go on."""
        pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {*lives, stop}
        while stop in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task is not stop and task.exception() is not None for task in done):
                return

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await asyncio.gather(*(child.ready.wait() for child in self.children))
        on_ready()

    async def _stop(self, lives: list[asyncio.Task[None]]) -> None:
        """SIGTERM, patience, SIGKILL; returns when every child is gone."""
        self._signal_all(signal.SIGTERM)
        _, alive = await asyncio.wait(lives, timeout=self._stop_timeout_s)
        if alive:
            names = ", ".join(sorted(task.get_name() for task in alive))
            if not self._killed:
                self._report(names, f"still there after {self._stop_timeout_s:g} s: killed")
            self._signal_all(signal.SIGKILL)
            await asyncio.wait(alive)

    def _signal_all(self, signal_number: int) -> None:
        for child in self.children:
            child.stop(signal_number)
