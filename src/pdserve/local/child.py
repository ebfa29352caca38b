"""One supervised child process: start it, read its lines, learn when it is ready, start it again when it dies.

A child tells its progress by lines `pdserve-stage: <text>`; everything else it prints goes to its log file, and
warnings, errors and whatever is no JSON log line to the terminal too. It counts as ready at the first 200 from
`/ready` that names its process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pdserve.addresses import passed_on, stop_listening
from pdserve.errors import ServiceError
from pdserve.local.launch import shim
from pdserve.local.plan import ChildSpec
from pdserve.local.probe import http_get
from pdserve.process import STAGE_PREFIX
from pdserve.readiness import read_readiness

MAX_FAILED_STARTS = 3
"""So many deaths in a row give up a child that was never ready."""
_QUIET_LEVELS = {"debug", "info"}
_PROBE_INTERVAL_S = 0.1
_STABLE_S = 60.0
"""A child that lived this long starts again without a pause."""


def backoff_s(num_deaths: int, *, base_s: float = 0.5, max_s: float = 30.0) -> float:
    """Pause before the next start, after this many deaths in a row (from 1)."""
    return min(max_s, base_s * 2.0 ** (num_deaths - 1))


class Child:
    """Keeps one process running. `run` ends when the child is given up; stop it with `stop`."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        log_folder: Path,
        report: Callable[[str, str], None],
        on_change: Callable[[], None],
        restarts: bool,
        is_verbose: bool = False,
        backoff: Callable[[int], float] = backoff_s,
    ) -> None:
        self.spec = spec
        self.state = "starting"
        self.pid: int | None = None
        self.ready = asyncio.Event()
        """Set for ever at the first time it is ready."""
        self._log_file = log_folder / f"{spec.id}.log"
        self._report, self._on_change = report, on_change
        self._restarts, self._is_verbose, self._backoff = restarts, is_verbose, backoff
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=15)

    async def run(self) -> None:
        """Start, wait, start again.

        Raises:
            ServiceError: the first start failed for good; the message carries the child's last line.
        """
        num_deaths = 0
        while not self._stopping.is_set():
            lived_s, returncode = await self._live()
            if self._stopping.is_set():
                return
            num_deaths = 1 if lived_s > _STABLE_S else num_deaths + 1
            self._give_up_if_hopeless(returncode, num_deaths)
            if not self._restarts:
                self._set_state("exited", f"{_how(returncode)}; not restarted")
                return
            pause_s = self._backoff(num_deaths)
            self._set_state("restarting", f"{_how(returncode)}; starting again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _live(self) -> tuple[float, int]:
        """One life; returns how long it was (s) and its exit status."""
        self._set_state("starting", "starting")
        started_s = asyncio.get_running_loop().time()
        process = self._process = await self._spawn()
        self.pid = process.pid
        if self._stopping.is_set():  # asked while it was being started
            self._send(signal.SIGKILL)
        self._on_change()
        probe = asyncio.create_task(self._wait_until_ready())
        try:
            with self._log_file.open("a", encoding="utf-8") as log:
                await self._read_lines(process, log)
            returncode = await process.wait()
        finally:
            for sock in self.spec.sockets.values():
                stop_listening(sock)
            probe.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probe
        self.pid = None
        return asyncio.get_running_loop().time() - started_s, returncode

    async def _spawn(self) -> asyncio.subprocess.Process:
        sockets = self.spec.sockets
        return await asyncio.create_subprocess_exec(
            *shim(self.spec.niceness),
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **self.spec.env, **passed_on(sockets)},
            pass_fds=[sock.fileno() for sock in sockets.values()],
            limit=1 << 20,
        )

    async def _wait_until_ready(self) -> None:
        while not await self._is_ready():  # noqa: ASYNC110  another process's state
            await asyncio.sleep(_PROBE_INTERVAL_S)
        self.ready.set()
        self._set_state("ready", "ready")

    async def _is_ready(self) -> bool:
        """Whether this very process says so, and no other that answers at its address."""
        answer = await http_get(f"{self.spec.ready_url}/ready")
        return answer is not None and answer.status == 200 and read_readiness(answer.body).pid == self.pid

    async def _read_lines(self, process: asyncio.subprocess.Process, log: TextIO) -> None:
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:  # a line beyond the limit: it was dropped, the next one is read
                continue
            if not raw:
                return
            self._take_line(raw.decode("utf-8", "replace").rstrip(), log)

    def _take_line(self, line: str, log: TextIO) -> None:
        if line.startswith(STAGE_PREFIX):
            self._report(self.spec.id, line.removeprefix(STAGE_PREFIX))
            return
        self._last_lines.append(line)
        print(line, file=log, flush=True)
        shown = line if self._is_verbose else shown_log_line(line)
        if shown and not self._stopping.is_set():
            self._report(self.spec.id, shown)

    def _give_up_if_hopeless(self, returncode: int, num_deaths: int) -> None:
        """Exit status 1 and 2 are the child's own words that it cannot run; a signal may be an accident."""
        is_hopeless = returncode in (1, 2) or num_deaths >= MAX_FAILED_STARTS or not self._restarts
        if is_hopeless and not self.ready.is_set():
            self.state = "exited"
            told = next((line for line in reversed(self._last_lines) if line.strip()), "it printed nothing")
            raise ServiceError(f"{self.spec.id} {_how(returncode)} before it was ready: {told} (log: {self._log_file})")

    def _set_state(self, state: str, text: str) -> None:
        if self._stopping.is_set():
            return
        self.state = state
        self._report(self.spec.id, text)
        self._on_change()

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Send a signal and start it no more."""
        self._stopping.set()
        self.state = "exited"
        self._send(signal_number)

    def _send(self, signal_number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal_number)


def shown_log_line(line: str) -> str:
    """What the terminal shows of a child's line: nothing of JSON log lines below warning."""
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
    except ValueError:
        return line
    level = str(record.get("level", "")).lower()
    if level in _QUIET_LEVELS:
        return ""
    return f"{level}: {record.get('message', line)}" if level else line


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
