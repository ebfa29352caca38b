"""A whole service of one's own, on free ports, for as long as a `with` block: for verify, benchmarks and tests.

Starts an embedded Redis and the same processes that `pdserve up` starts, waits until they are ready, and stops
everything. Unlike the supervisor it is synchronous and never restarts anything by itself: who kills a process
here wants to see what happens without it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from pdserve.addresses import passed_on, stop_listening
from pdserve.errors import ServiceError
from pdserve.local.launch import shim
from pdserve.local.plan import threads_for
from pdserve.local.ports import hold_port
from pdserve.local.redis_server import RedisServer
from pdserve.readiness import read_readiness

_HOST = "127.0.0.1"
_POLL_S = 0.05
_LAST_LINES = 40
_STOP_TIMEOUT_S = 15.0
_HELD_STATES = ("owned", "leased", "receiving", "quarantined")
_OF_THE_MACHINE = frozenset({"PDS_HOME", "PDS_CPU_KERNELS", "PDS_CPU_ISA"})
"""Variables of the caller that say how this machine computes. Others are settings of a service, and this one has its
own."""


@dataclass
class ServiceProcess:
    """One process of the service; started again it keeps its name and its ports."""

    role: str
    index: int
    url: str
    """Base URL of /ready, /health, /metrics and /debug."""
    env: dict[str, str]
    log_file: Path
    sockets: dict[str, socket.socket] = field(default_factory=dict, repr=False)
    """Its ports, held for as long as the service lives."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        """Role and number; of workers also the worker id."""
        return f"{self.role}-{self.index}"

    @property
    def metrics_url(self) -> str:
        """The address that Prometheus scrapes."""
        return f"{self.url}/metrics"

    @property
    def pid(self) -> int | None:
        """Process id, or None when it does not run."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def last_lines(self) -> str:
        """The end of what it has printed, some 40 lines."""
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return "\n".join(lines[-_LAST_LINES:])


class PrivateService:
    """Context manager; also `start()` and `stop()`.

    Args:
        model: as the setting MODEL.
        num: processes by role; absent roles have one.
        settings: settings of all processes, by name (`{"KV_LEASE_S": 2}`); None leaves a setting alone.
        role_settings: on top of `settings`, by role.
        faults: test hooks: `{}` makes them settable, an object sets them in every process.
        start_timeout_s: for everything to become ready.

    Raises:
        ServiceError: on entering: a process died (its last lines are in the message), or not ready in time.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num: Mapping[str, int] | None = None,
        settings: Mapping[str, object] | None = None,
        role_settings: Mapping[str, Mapping[str, object]] | None = None,
        faults: Mapping[str, Any] | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="pdserve-service-"))
        self._redis = RedisServer()
        self._http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))  # making one takes a poll's time
        self._model, self._settings, self._faults = str(model), dict(settings or {}), faults
        self._role_settings = role_settings or {}
        counts = {"prefill": 1, "decode": 1, "gateway": 1} | dict(num or {})
        self._threads = threads_for(os.cpu_count() or 1, counts["prefill"], counts["decode"])
        self.processes = [self._plan(role, index) for role, count in counts.items() for index in range(count)]

    # --- what runs

    @property
    def url(self) -> str:
        """Base URL of the API (of the first gateway)."""
        return f"http://{_HOST}:{self.process('gateway').env['PDS_PORT']}"

    @property
    def redis_url(self) -> str:
        """The URL of the embedded server."""
        return self._redis.url

    @property
    def workers(self) -> list[ServiceProcess]:
        """Prefill and decode workers."""
        return [process for process in self.processes if process.role != "gateway"]

    def process(self, role: str, index: int = 0) -> ServiceProcess:
        """One process by role and number."""
        return next(process for process in self.processes if (process.role, process.index) == (role, index))

    # --- start and stop

    def start(self) -> Self:
        """Start everything and wait until it is ready."""
        try:
            self._redis.start()
            for process in self.processes:
                self._spawn(process)
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """SIGTERM, patience, SIGKILL; gateways first, Redis last. Harmless when nothing runs."""
        for process in sorted(self.processes, key=lambda process: process.role != "gateway"):
            if process.process is not None and process.pid is not None:
                process.process.terminate()
        give_up_s = time.monotonic() + _STOP_TIMEOUT_S
        for process in self.processes:
            if process.process is not None:
                _end(process.process, max(0.0, give_up_s - time.monotonic()))
            for sock in process.sockets.values():
                sock.close()
        self._redis.stop()
        self._http.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every process that should run answers /ready.

        Raises:
            ServiceError: one has died, or not within the timeout; with its last lines.
        """
        timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        give_up_s = time.monotonic() + timeout_s
        for process in self.processes:
            while process.process is not None and (obstacle := self._why_not_ready(process)) is not None:
                if process.pid is None:
                    self._give_up(f"{process.id} exited with {process.process.poll()}", process)
                if time.monotonic() > give_up_s:
                    self._give_up(f"{process.id} was not ready within {timeout_s:g} s ({obstacle})", process)
                time.sleep(_POLL_S)

    def _why_not_ready(self, process: ServiceProcess) -> str | None:
        try:
            response = self._http.get(f"{process.url}/ready", timeout=5)
        except httpx.HTTPError as error:
            return f"/ready does not answer: {type(error).__name__}"
        return None if response.status_code == 200 else read_readiness(response.content).message

    def _give_up(self, what: str, process: ServiceProcess) -> None:
        raise ServiceError(f"{what}; its last lines:\n{process.last_lines() or '(it printed nothing)'}")

    # --- what tests do to it

    def kill(self, role: str, index: int = 0, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL the process is gone when this returns."""
        process = self.process(role, index)
        assert process.process is not None, process
        process.process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            process.process.wait()
            process.process = None
            for sock in process.sockets.values():
                stop_listening(sock)

    def restart(self, role: str, index: int = 0, *, wait_s: float | None = 60.0) -> None:
        """Start a killed process again, same name and ports; `wait_s=None` does not wait until all are ready."""
        process = self.process(role, index)
        assert process.pid is None, f"{process.id} still runs"
        self._spawn(process)
        if wait_s is not None:
            self.wait_ready(wait_s)

    def restart_redis(self) -> None:
        """Kill Redis and start an empty one at the same URL."""
        self._redis.stop()
        self._redis.start()

    def put_faults(self, role: str, faults: Mapping[str, Any], index: int = 0) -> None:
        """Replace a process's test hooks."""
        self._http.put(f"{self.process(role, index).url}/debug/faults", json=faults, timeout=5).raise_for_status()

    def ledgers(self) -> dict[str, dict[str, Any]]:
        """`/debug/kv` of every worker that runs, by worker id; `{"ok": false, "error": …}` where it cannot be told."""
        running = [process for process in self.workers if process.pid is not None]
        return {p.id: self._http.get(f"{p.url}/debug/kv", timeout=20).json() for p in running}

    def wait_until_nothing_is_held(self, timeout_s: float) -> None:
        """Wait until every KV ledger is in order and no block is owned, leased, receiving or quarantined.

        Raises:
            ServiceError: not within the timeout; the message shows the ledgers.
        """
        give_up_s = time.monotonic() + timeout_s
        while any(map(held_blocks, (ledgers := self.ledgers()).values())):
            if time.monotonic() > give_up_s:
                shown = "\n".join(f"{worker}: {json.dumps(ledger)}" for worker, ledger in ledgers.items())
                raise ServiceError(f"KV blocks are still held after {timeout_s:g} s:\n{shown}")
            time.sleep(_POLL_S)

    # --- processes

    def _plan(self, role: str, index: int) -> ServiceProcess:
        sockets = {"METRICS_PORT": hold_port(_HOST, 0)}
        metrics_port = sockets["METRICS_PORT"].getsockname()[1]
        values: dict[str, object] = {
            "MODEL": self._model,
            "REDIS_URL": self._redis.url,
            "SERVICE": "private",
            "HOST": _HOST,
            "METRICS_PORT": metrics_port,
            "DRAIN_S": 1,
        }
        if role == "gateway":
            sockets["PORT"] = hold_port(_HOST, 0)
            values["PORT"] = sockets["PORT"].getsockname()[1]
        else:
            threads = self._threads.prefill if role == "prefill" else self._threads.decode
            values |= {"WORKER_ID": f"{role}-{index}", "THREADS": threads}
        values |= self._settings | dict(self._role_settings.get(role, {}))
        env = {f"PDS_{name}": _text(value) for name, value in values.items() if value is not None}
        if self._faults is not None:
            env["PDS_FAULTS"] = json.dumps(self._faults) if self._faults else "1"
        log_file = self._folder / f"{role}-{index}.log"
        return ServiceProcess(role, index, f"http://{_HOST}:{metrics_port}", env, log_file, sockets)

    def _spawn(self, process: ServiceProcess) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PDS_") or k in _OF_THE_MACHINE}
        for sock in process.sockets.values():
            stop_listening(sock)
        env = (
            inherited
            | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            | process.env
            | passed_on(process.sockets)
        )
        with process.log_file.open("ab") as log:
            process.process = subprocess.Popen(
                [*shim(), sys.executable, "-P", "-m", "pdserve", process.role],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[sock.fileno() for sock in process.sockets.values()],
            )


def held_blocks(ledger: Mapping[str, Any]) -> int:
    """KV blocks that a worker has not given back; a ledger that does not add up counts as one."""
    held = sum(int(ledger.get("by_state", {}).get(state, 0)) for state in _HELD_STATES)
    return held + (0 if ledger["ok"] is True else 1)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
