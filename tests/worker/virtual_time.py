"""An event loop whose time passes only by waiting: when nothing is left to do, it is the time of the next timer.

So a test over minutes takes milliseconds, and every run of it is the same. Work for other threads runs at once.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

START_S = 1000.0


class _Selector(selectors.SelectSelector):
    """Never waits; the time that it would have waited is over."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everything waits, and no timer is set"
            self.now_s += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` is the clock of everything in a test."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def stand_still(self, seconds: float) -> None:
        """Let time pass without anything running, as for a process that was stopped."""
        self._virtual.now_s += seconds

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        future.set_result(function(*args))
        return future


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on a loop of its own, in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for a condition; it is looked at every millisecond of virtual time, and less often after half a second."""
    began_s = now_s()
    while not condition():
        assert now_s() < began_s + within_s, f"not within {within_s} s"
        await asyncio.sleep(0.001 if now_s() < began_s + 0.5 else 0.02)
