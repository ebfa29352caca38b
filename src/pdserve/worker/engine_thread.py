"""The thread that owns the engine. Its loop reads: admit what arrived, rest if asked to, step, hand the output over.

Nothing else changes the engine. The event loop sends commands, which get the engine between two steps, and hears
of every step's output on the loop. The thread never sees a bus, a transport or a socket.
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
Command = Callable[[Engine], object]

_STALLED_WAIT_S = 0.02
"""Pause before the next attempt when work exists but nothing could run (all blocks held by hand-offs)."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A step that raised; its sequences are aborted already."""

    name: str
    """Type name of the exception."""
    sequences: list[Sequence]


class EngineListener(Protocol):
    """Hears of the engine's doings, on the event loop."""

    def on_admitted(self, sequence: Sequence) -> None:
        """The scheduler took this sequence for the first time; its first tokens are about to be computed."""
        ...

    def on_step(self, output: StepOutput) -> None:
        """A step did something."""
        ...

    def on_step_failed(self, failure: StepFailure) -> None:
        """A step raised an exception; its sequences are lost."""
        ...


class EngineThread:
    """Runs an engine; every method but `start` and `stop` belongs to the event loop.

    Args:
        engine: changed by this thread alone from `start` on; its sizes and hashes may be read from any thread.
        before_step: test hook, called in the thread before every step.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        before_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
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
        """Let at least so many seconds pass from the beginning of one step to that of the next; before `start`.

        Asked in the thread, again after every command: 0 ends a rest at once.
        """
        self._interval_s = interval_s

    def start(self, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> None:
        """Begin to serve; the listener hears of everything on `loop`."""
        self.attach(loop, listener)
        self._thread.start()

    def attach(self, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> None:
        """Set who hears of everything, without a thread: `turn` then runs the engine, where a test wants it to."""
        self._loop = loop
        self._listener = listener
        self.engine.on_admitted = lambda sequence: self._deliver(listener.on_admitted, sequence)

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

    def post_output(self, command: Callable[[Engine], StepOutput | None]) -> None:
        """Run a command like `post` does; what it ended is told like a step's output."""

        def deliver(engine: Engine) -> None:
            output = command(engine)
            if output is not None and self._listener is not None:
                self._deliver(self._listener.on_step, output)

        self._commands.put(deliver)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function between two steps and wait for its result or exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._commands.put(command)
        return await future

    # --- in the thread

    def _run(self) -> None:
        while True:
            if not self.engine.has_work:
                self._commands.wait()
            if not self._admit_commands():
                return
            if self.engine.has_work and not self._rests() and not self._step():
                self._commands.wait(_STALLED_WAIT_S)

    def turn(self, *, has_step: bool = True) -> None:
        """Run all queued commands, then one step if there is work and it `has_step`; never waits."""
        if self._admit_commands() and has_step and self.engine.has_work:
            self._step()

    def _admit_commands(self) -> bool:
        """Run all queued commands. False: stop."""
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

    def _step(self) -> bool:
        """Run one step and tell its output, or its failure; False: nothing could run."""
        assert self._listener is not None
        self._step_began_s = self._last_began_s = self._clock()
        try:
            self._before_step()
            output = self.engine.step()
        except Exception as error:
            logger.exception("step failed")
            self._deliver(self._listener.on_step_failed, self._drop_step(error))
            return True
        finally:
            self._step_began_s = None
        if not output.is_empty:
            self._deliver(self._listener.on_step, output)
        return not output.is_empty

    def _drop_step(self, error: Exception) -> StepFailure:
        """Abort all sequences of the step: they would fail again."""
        sequences = list(self.engine.sequences_in_step)
        for sequence in sequences:
            self.engine.abort(sequence)
        return StepFailure(type(error).__name__, sequences)

    def _guarded(self, command: Command) -> None:
        try:
            command(self.engine)
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
