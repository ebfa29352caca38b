"""One container as a local process: start, probes, restarts with growing pauses, preStop, grace period."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from cluster.pod_sandbox import Fetch, NotYetError, Sandbox, expanded

Json = dict[str, Any]

_FIRST_BACKOFF_S = 1.0
"""A kubelet waits 10 s; tests need not."""
_MAX_BACKOFF_S = 10.0
_SHOWN_S = 0.3
"""How long a failed container is shown as terminated before it waits."""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Container:
    """Runs until `stop`; `changed` is called whenever its status is another."""

    def __init__(
        self, pod: Json, spec: Json, sandbox: Sandbox, fetch: Fetch, log: Path, base_env: dict[str, str],
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._pod, self._spec, self._sandbox, self._fetch = pod, spec, sandbox, fetch
        self._log, self._base_env, self._changed = log, base_env, changed
        self._env: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self.num_restarts = 0
        self.is_ready = self.has_started = False
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self.last_state: Json = {}

    @property
    def status(self) -> Json:
        """As in containerStatuses."""
        return {
            "name": self._spec["name"], "image": self._spec["image"], "imageID": "", "ready": self.is_ready,
            "started": self.has_started, "restartCount": self.num_restarts, "state": self.state,
            "lastState": self.last_state,
        }  # fmt: skip

    async def run(self) -> None:
        """Start it again and again."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._is_stopping:
            await self._prepare()
            began_s = time.monotonic()
            code = await self._live()
            if self._is_stopping:
                return
            backoff_s = _FIRST_BACKOFF_S if time.monotonic() - began_s > 60 else backoff_s
            ended = {"exitCode": code, "reason": "Error", "finishedAt": now(), "message": self._last_words()}
            self._set({"terminated": ended}, last={"terminated": ended})
            await asyncio.sleep(_SHOWN_S)
            self._set({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}})
            await asyncio.sleep(backoff_s)
            backoff_s = min(_MAX_BACKOFF_S, 2 * backoff_s)
            self.num_restarts += 1

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, patience, SIGKILL; everything within the grace period."""
        self._is_stopping = True
        end_s = time.monotonic() + grace_s
        process = self._process
        if process is None or process.returncode is not None:
            return
        hook = self._spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._execute(hook), grace_s)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), max(0.0, end_s - time.monotonic()))
        self._signal(signal.SIGKILL)
        await process.wait()

    async def _prepare(self) -> None:
        while not self._is_stopping:
            try:
                self._env = await self._sandbox.environment(self._pod, self._spec, self._base_env, self._fetch)
            except NotYetError as error:
                self._set({"waiting": {"reason": error.reason, "message": str(error)}})
                await asyncio.sleep(0.5)
            else:
                return

    async def _live(self) -> int:
        words = [expanded(w, self._env) for w in [*self._spec.get("command", []), *self._spec.get("args", [])]]
        self._process = await self._spawn(words)
        self._set({"running": {"startedAt": now()}})
        probes = asyncio.create_task(self._probe_for_ever())
        code = await self._process.wait()
        probes.cancel()
        self._signal(signal.SIGKILL)  # what it may have left behind
        self.is_ready = self.has_started = False
        return code

    async def _spawn(self, words: list[str]) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            command = self._sandbox.command(self._spec, dict(self._env), words)
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    async def _execute(self, words: list[str]) -> int:
        process = await self._spawn(words)
        return await process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _set(self, state: Json, last: Json | None = None) -> None:
        self.state = state
        if last is not None:
            self.last_state = last
        self._changed()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return "\n".join(lines[-5:])[-1000:]

    # --- probes

    async def _probe_for_ever(self) -> None:
        startup = self._spec.get("startupProbe")
        if startup is not None and not await self._starts(startup):
            self._signal(signal.SIGKILL)
            return
        self.has_started = True
        self._changed()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_readiness())
            tasks.create_task(self._watch_liveness())

    async def _starts(self, probe: Json) -> bool:
        for _ in range(probe.get("failureThreshold", 3)):
            if await self._passes(probe):
                return True
            await asyncio.sleep(probe.get("periodSeconds", 10))
        return False

    async def _watch_readiness(self) -> None:
        probe = self._spec.get("readinessProbe")
        failures = 0
        while True:
            passes = probe is None or await self._passes(probe)
            failures = 0 if passes else failures + 1
            is_ready = passes or (self.is_ready and failures < (probe or {}).get("failureThreshold", 3))
            if is_ready != self.is_ready:
                self.is_ready = is_ready
                self._changed()
            await asyncio.sleep((probe or {}).get("periodSeconds", 10))

    async def _watch_liveness(self) -> None:
        probe = self._spec.get("livenessProbe")
        failures = 0
        while probe is not None:
            failures = 0 if await self._passes(probe) else failures + 1
            if failures >= probe.get("failureThreshold", 3):
                self._signal(signal.SIGKILL)
                return
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _passes(self, probe: Json) -> bool:
        timeout_s = probe.get("timeoutSeconds", 1)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._check(probe)
        except (TimeoutError, OSError, httpx.HTTPError):
            return False

    async def _check(self, probe: Json) -> bool:
        if "httpGet" in probe:
            url = f"http://{self._sandbox.address}:{self._port(probe['httpGet']['port'])}{probe['httpGet']['path']}"
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                return (await client.get(url)).is_success
        if "tcpSocket" in probe:
            check: Awaitable[Any] = asyncio.open_connection(
                self._sandbox.address, self._port(probe["tcpSocket"]["port"])
            )
            _, writer = await check
            writer.close()
            return True
        return await self._execute(probe["exec"]["command"]) == 0

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        return next(int(p["containerPort"]) for p in self._spec["ports"] if p["name"] == port)
