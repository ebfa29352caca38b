"""A whole service on one machine: model, bus, workers, gateways, in this order; what `pdserve up` runs.

Knows how the parts fit together; how they are kept running is the supervisor's, who they are is the plan's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdserve.addresses import bind, peer_host
from pdserve.errors import BusError
from pdserve.http_server import url_of
from pdserve.local.plan import (
    ROLES,
    ChildSpec,
    UpOptions,
    child_command,
    is_set,
    resolved,
    step_interval_s,
    threads_for,
    worker_spec,
)
from pdserve.local.ports import hold_port, hold_ports
from pdserve.local.redis_server import RedisServer
from pdserve.local.service_file import LocalProcess, LocalService, owned, run_folder, write
from pdserve.local.supervisor import Report, Supervisor
from pdserve.models.resolve import resolve_model, served_model_name
from pdserve.settings import GatewaySettings, ProcessSettings

FIRST_METRICS_PORT = 9101
_DRAIN_S = 3.0
"""Drain time of all processes unless it is set: a user does not wait half a minute after Ctrl-C."""
_REDIS_WATCH_INTERVAL_S = 0.2


class OneMachine:
    """One `pdserve up`, from its options to its last process."""

    def __init__(
        self,
        options: UpOptions,
        *,
        env: Mapping[str, str],
        home: Path,
        report: Report,
        on_ready: Callable[[LocalService], None],
        command: Callable[[str, list[str]], list[str]] = child_command,
    ) -> None:
        """`command(role, flags)` is what a child runs."""
        self._command = command
        self._options, self._env, self._home = options, env, home
        self._report, self._on_ready = report, on_ready
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def run(self) -> None:
        """Start everything and keep it running until SIGINT or SIGTERM.

        Raises:
            PdserveError: a setting, the model, a port, the bus or the start of a child; everything is stopped again.
        """
        gateway, gateway_flags = self._resolved("gateway", {})
        assert isinstance(gateway, GatewaySettings), gateway
        interval_s = step_interval_s(gateway.tpot_slo_s, self._options.num["prefill"])
        resting = {} if interval_s is None else {"STEP_INTERVAL_S": interval_s}
        workers = [self._resolved(role, resting) for role in ("prefill", "decode")]
        settings, flags = zip((gateway, gateway_flags), *workers, strict=True)
        with owned(self._home, gateway.service) as file, ExitStack() as held:
            api = held.enter_context(hold_port(gateway.host, gateway.port))
            models = [self._model_flags(role_settings) for role_settings in settings]
            with self._bus(gateway) as (redis_url, server):
                common = [[*own, *model, f"--redis-url={redis_url}"] for own, model in zip(flags, models, strict=True)]
                hosts = {role: role_settings.host for role, role_settings in zip(ROLES, settings, strict=True)}
                specs = self._specs(hosts, api, *common, is_own_bus=server is not None, held=held)
                asyncio.run(self._supervise(file, gateway, specs, redis_url, server))

    def _resolved(self, role: str, more_defaults: Mapping[str, object]) -> tuple[ProcessSettings, list[str]]:
        num = self._options.num
        threads = threads_for(self._num_cores, num["prefill"], num["decode"])
        defaults = {
            "THREADS": threads.decode if role == "decode" else threads.prefill,
            "DRAIN_S": _DRAIN_S,
            "LOG_FORMAT": "console" if self._options.is_verbose else "json",
            **more_defaults,
        }
        settings, added = resolved(role, self._options.flags[role], self._env, defaults)
        assert isinstance(settings, ProcessSettings), settings
        return settings, [*self._options.flags[role], *added]

    def _model_flags(self, settings: ProcessSettings) -> list[str]:
        """The model is made once, here, and not by every child at the same time."""
        folder = resolve_model(settings.model, self._home, lambda line: self._report("model", line))
        name = settings.served_model_name or served_model_name(settings.model)
        return [f"--model={folder}", f"--served-model-name={name}", f"--service={settings.service}"]

    @contextmanager
    def _bus(self, gateway: GatewaySettings) -> Iterator[tuple[str, RedisServer | None]]:
        """The server that was named, or an embedded one for as long as the service runs."""
        if is_set("gateway", "REDIS_URL", self._options.flags["gateway"], self._env):
            yield gateway.redis_url, None
            return
        with RedisServer() as server:
            self._report("redis", f"ready (embedded, pid {server.pid})")
            yield server.url, server

    def _specs(
        self,
        hosts: Mapping[str, str],
        api: socket.socket,
        gateway_flags: list[str],
        prefill_flags: list[str],
        decode_flags: list[str],
        *,
        is_own_bus: bool,
        held: ExitStack,
    ) -> list[ChildSpec]:
        """Workers first: they take longest. On a shared bus their names carry the machine's.

        Every port is held in `held` before its process starts, and by its socket the process gets it.
        """
        num = self._options.num
        url, port = _local_url(hosts["gateway"], api), api.getsockname()[1]
        ports = {host: hold_ports(host, FIRST_METRICS_PORT) for host in set(hosts.values())}
        prefix = "" if is_own_bus else f"{socket.gethostname()}-"
        threads = threads_for(self._num_cores, num["prefill"], num["decode"])
        specs: list[ChildSpec] = []
        for role, flags in (("prefill", prefill_flags), ("decode", decode_flags)):
            for index in range(num[role]):
                worker_id, metrics = f"{prefix}{role}-{index}", held.enter_context(next(ports[hosts[role]]))
                own = [f"--worker-id={worker_id}", f"--metrics-port={metrics.getsockname()[1]}"]
                spec = worker_spec(
                    role,
                    worker_id,
                    self._command(role, [*flags, *own]),
                    _local_url(hosts[role], metrics),
                    metrics=metrics,
                    threads=threads.prefill if role == "prefill" else threads.decode,
                    yields=role == "prefill" and num["decode"] > 0,
                )
                specs.append(spec)
        if num["gateway"] > 1:  # no longer ours alone, and still no other program's
            api.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for index in range(num["gateway"]):
            own, ready_url, sockets = [f"--port={port}"], url, {"PORT": api}
            if num["gateway"] > 1:  # behind one port any of them may answer
                metrics = held.enter_context(next(ports[hosts["gateway"]]))
                own.append(f"--metrics-port={metrics.getsockname()[1]}")
                ready_url = _local_url(hosts["gateway"], metrics)
                its_api = api if index == 0 else held.enter_context(bind(*api.getsockname()[:2], is_shared=True))
                sockets = {"PORT": its_api, "METRICS_PORT": metrics}
            spec = ChildSpec(
                role="gateway",
                id=f"{prefix}gateway-{index}",
                command=self._command("gateway", [*gateway_flags, *own]),
                ready_url=ready_url,
                api_url=url,
                sockets=sockets,
            )
            specs.append(spec)
        return specs

    async def _supervise(
        self,
        file: Path,
        gateway: GatewaySettings,
        specs: list[ChildSpec],
        redis_url: str,
        server: RedisServer | None,
    ) -> None:
        log_folder = run_folder(self._home) / gateway.service
        shutil.rmtree(log_folder, ignore_errors=True)  # of the last run
        log_folder.mkdir(parents=True)

        def snapshot() -> LocalService:
            return LocalService(
                service=gateway.service,
                url=next(spec.url for spec in specs if spec.role == "gateway"),
                redis_url=redis_url,
                redis_pid=server.pid if server else None,
                supervisor_pid=os.getpid(),
                log_folder=str(log_folder),
                processes=[
                    LocalProcess(
                        role=child.spec.role,
                        id=child.spec.id,
                        pid=child.pid,
                        url=child.spec.url,
                        metrics_url=f"{child.spec.ready_url}/metrics",
                        state=child.state,
                        niceness=child.spec.niceness,
                    )
                    for child in supervisor.children
                ],
            )

        supervisor = Supervisor(
            specs,
            log_folder=log_folder,
            report=self._report,
            on_change=lambda: write(file, snapshot()),
            restarts=self._options.restarts,
            is_verbose=self._options.is_verbose,
            stop_timeout_s=gateway.drain_s + 5.0,
        )
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, supervisor.request_stop)
        watch = asyncio.create_task(self._watch_redis(server)) if server else None
        try:
            await supervisor.run(lambda: self._on_ready(snapshot()))
        finally:
            if watch:
                watch.cancel()

    async def _watch_redis(self, server: RedisServer) -> None:
        """The bus holds nothing that cannot be lost: an empty one at the same address is as good."""
        while True:
            await asyncio.sleep(_REDIS_WATCH_INTERVAL_S)
            if server.pid is None:
                self._report("redis", "died; starting an empty one")
                try:
                    server.start()
                except (BusError, OSError) as error:
                    self._report("redis", f"{error}; trying again")


def _local_url(host: str, sock: socket.socket) -> str:
    """Where this machine reaches what listens on a socket that was bound to `host`."""
    return url_of(sock, peer_host(host, is_same_machine=True))
