"""What gateways, workers and operators do alike as processes: listen or explain, say stages, run until stopped.

A process lives as long as its background tasks. The first that ends by itself, the HTTP port among them, ends the
process with a reason: a log line, one sentence on stderr and exit status 1, so that its starter can start it again.
SIGTERM or SIGINT asks for the end, and a second signal ends the process at once, with nothing handed back.

Never decides what draining means: that is what each process brings as its own work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from pdserve.addresses import listen_on, take_passed
from pdserve.errors import PdserveError, ProcessError, SettingError
from pdserve.faults import Faults
from pdserve.http_server import BACKLOG, listen
from pdserve.log import get_logger

logger = get_logger(__name__)

Work = Coroutine[Any, Any, object]

STAGE_PREFIX = "pdserve-stage: "
"""Lines on stdout that begin so tell the starter of a process how far it is; `pdserve up` shows them."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAIN_TASK = "the main task"


def say_stage(text: str) -> None:
    """Print one stage line, for example `loading the model`."""
    print(f"{STAGE_PREFIX}{text}", flush=True)


def read_faults(environ: Mapping[str, str]) -> Faults | None:
    """The test hooks of this process, or None without PDS_FAULTS; returns after the delay that they ask for.

    Raises:
        SettingError: PDS_FAULTS holds no such object.
    """
    faults = Faults.from_env(environ)
    if faults is not None:
        time.sleep(faults.delay_s("start"))
    return faults


def listen_or_explain(setting: str, host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening TCP socket, the one that our starter holds for us if any; `is_shared`: others listen there, too.

    Raises:
        SettingError: the port cannot be opened; the message names `setting`, port, host and the system's reason.
    """
    try:
        held = take_passed(setting)
        return listen(host, port, is_shared=is_shared) if held is None else listen_on(held, BACKLOG)
    except OSError as error:
        raise SettingError(setting, port, f"a port that is free on {host} ({error.strerror})") from error


def stop_on_signals(stop: asyncio.Event) -> None:
    """Let SIGTERM and SIGINT set `stop`; the next one of either ends the process with status 128 + its number.

    Called from the event loop, and called again by an owner of code that took the signals over.
    """
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            _end_at_once(number)
        # Not by the loop from now on: a second signal is meant for a process that hangs, too.
        for each in _STOP_SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, lambda number, _: _end_at_once(number))
        logger.info("%s: stopping", signal.Signals(number).name)
        stop.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)


async def run_with_background(work: Work, background: Mapping[str, Work]) -> None:
    """Run `work` to its end, and everything in `background` beside it until then.

    Args:
        work: usually waits for the stop event and drains.
        background: what never ends by itself, by a name with its article, such as `the HTTP port`.

    Raises:
        ProcessError: something of the background ended first, or `work` failed by a defect; all else is cancelled.
        PdserveError: `work` raised it.
    """
    main = asyncio.create_task(work, name=_MAIN_TASK)
    others = [asyncio.create_task(coroutine, name=name) for name, coroutine in background.items()]
    try:
        await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        _raise_reason(main if main.done() else next(task for task in others if task.done()))
    finally:
        for task in (main, *others):
            task.cancel()
        await asyncio.gather(main, *others, return_exceptions=True)


def _raise_reason(task: asyncio.Task[object]) -> None:
    """Return only for a main task that has ended well."""
    name, error = task.get_name(), None if task.cancelled() else _cause(task.exception())
    is_main, is_expected = name == _MAIN_TASK, isinstance(error, PdserveError)
    if error is None:
        if is_main and not task.cancelled():
            return
        reason = ProcessError(f"{name} has ended, and this process cannot go on without it")
    elif isinstance(error, ProcessError) or (is_main and is_expected):
        raise error
    else:
        reason = ProcessError(f"{name} has died: {error if is_expected else repr(error)}")
    logger.error("%s", reason, exc_info=None if is_expected else error)
    raise reason from error


def _cause(error: BaseException | None) -> BaseException | None:
    """The first error in groups of groups, as task groups raise them."""
    return _cause(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _end_at_once(number: int) -> None:
    os.write(2, f"{signal.Signals(number).name}: ended at once by a second signal\n".encode())
    os._exit(128 + number)
