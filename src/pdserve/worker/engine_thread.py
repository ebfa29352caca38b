"""The thread that owns the engine. Its loop reads: admit what arrived, rest if asked to, step, hand the output over.

Nothing else touches the engine. The event loop sends it commands, which run between two steps, and gets
every step's output back on the loop. The thread never sees a bus, a transport or a socket.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.log import get_logger
from pdserve.mailbox import Mailbox

T = TypeVar("T")
Command = Callable[[], object]

_STALLED_WAIT_S = 0.02
"""Pause before the next attempt when work exists but nothing could run (all blocks held by hand-offs)."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A step that raised; its sequences are aborted already."""

    name: str
    """Of the exception."""
    sequences: list[Sequence]


class EngineListener(Protocol):
    """Who hears of the engine's doings, on the event loop."""

    def on_admitted(self, sequence: Sequence) -> None:
        """The scheduler took this sequence for the first time; its first tokens are about to be computed."""
        ...

    def on_step(self, output: StepOutput) -> None:
        """A step did something."""
        ...

    def on_step_failed(self, failure: StepFailure) -> None:
        """A step raised."""
        ...


class EngineThread:
    """Runs an engine; every method but `start` and `stop` belongs to the event loop.

    Args:
        engine: owned by this thread from `start` on.
        before_step: test hook, called in the thread before every step.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        before_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._before_step = before_step
        self._clock = clock
        self._listener: EngineListener | None = None
        self._commands: Mailbox[Command | None] = Mailbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began_s: float | None = None
        self._last_began_s = -math.inf
        self._interval_s: Callable[[], float] = _no_interval

    def space_steps(self, interval_s: Callable[[], float]) -> None:
        """From the beginning of one step to that of the next at least so many seconds pass; before `start`.

        Asked in the thread, again after every command: 0 ends a rest at once.
        """
        self._interval_s = interval_s

    def start(self, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> None:
        """Begin to serve; the listener hears of everything on `loop`."""
        self._loop = loop
        self._listener = listener
        self._engine.on_admitted = lambda sequence: self._deliver(listener.on_admitted, sequence)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the current step. A step that hangs is left behind: the thread is a daemon."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    async def wait_for_end(self) -> None:
        """Return within a second after the thread has ended, which is a defect before `stop`."""
        while self._thread.is_alive():  # noqa: ASYNC110  a thread that dies sets no event
            await asyncio.sleep(1.0)

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def post(self, command: Command) -> None:
        """Run a command between two steps; its exception is a defect and is logged."""
        self._commands.put(command)

    def post_output(self, command: Callable[[], StepOutput | None]) -> None:
        """As `post`; what the command ended is told like a step's output."""

        def deliver() -> None:
            output = command()
            if output is not None and self._listener is not None:
                self._deliver(self._listener.on_step, output)

        self._commands.put(deliver)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps and wait for its result or exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._commands.put(command)
        return await future

    # --- in the thread

    def _run(self) -> None:
        assert self._listener is not None
        while self._admit_commands():
            if not self._engine.has_work or self._rests():
                continue
            output = self._step()
            if output is not None:
                self._deliver(self._listener.on_step, output)

    def _admit_commands(self) -> bool:
        """Run all queued commands; with nothing to do, wait for one. False: stop."""
        if not self._engine.has_work:
            self._commands.wait()
        for command in self._commands.take():
            if command is None:
                return False
            self._guarded(command)
        return True

    def _rests(self) -> bool:
        """Leave the cores to others until the next step is due, or a command arrives; False: it is due."""
        left_s = self._last_began_s + self._interval_s() - self._clock()
        if left_s <= 0:
            return False
        self._commands.wait(left_s)
        return True

    def _step(self) -> StepOutput | None:
        assert self._listener is not None
        self._step_began_s = self._last_began_s = self._clock()
        try:
            self._before_step()
            output = self._engine.step()
        except Exception as error:
            logger.exception("step failed")
            self._deliver(self._listener.on_step_failed, self._drop_step(error))
            return None
        finally:
            self._step_began_s = None
        if output.is_empty:
            self._commands.wait(_STALLED_WAIT_S)
            return None
        return output

    def _drop_step(self, error: Exception) -> StepFailure:
        """Whoever was in the step would fail again: abort them all."""
        sequences = list(self._engine.sequences_in_step)
        for sequence in sequences:
            self._engine.abort(sequence)
        return StepFailure(type(error).__name__, sequences)

    def _guarded(self, command: Command) -> None:
        try:
            command()
        except Exception:
            logger.exception("engine command failed")

    def _deliver(self, callback: Callable[[T], None], value: T) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, value)
        except RuntimeError:
            logger.debug("event loop is closed, output dropped")


def _no_interval() -> float:
    return 0.0


def _settle(future: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]  # result belongs to a call without error
