"""Runs one operator process: lead, watch, reconcile, until SIGTERM or until another one leads."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

import kopf

from pdserve.http_server import watch_port
from pdserve.log import get_logger, setup_logging
from pdserve.operator.cluster.discovery import discover, wait_for_own_kinds
from pdserve.operator.cluster.kube import Kube
from pdserve.operator.cluster.login import ClusterLogin
from pdserve.operator.handlers import make_registry, make_settings
from pdserve.operator.leader import Leadership
from pdserve.operator.loop import ReconcileLoop
from pdserve.operator.settings import OperatorSettings
from pdserve.operator.telemetry import Telemetry, serve
from pdserve.process import listen_or_explain, run_with_background, stop_on_signals
from pdserve.settings import load

logger = get_logger(__name__)


def main(argv: list[str]) -> int:
    """Run until SIGTERM: 0.

    Raises:
        ProcessError: leadership was lost or something else died; the starter of this process starts it again.
    """
    settings = load(OperatorSettings, argv, os.environ)
    identity = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    setup_logging(settings.log_level, settings.log_format, process=f"operator {identity}")
    asyncio.run(_run(settings, identity))
    return 0


async def _run(settings: OperatorSettings, identity: str) -> None:
    sock = listen_or_explain("METRICS_PORT", settings.host, settings.metrics_port)
    kube = Kube(ClusterLogin())
    try:
        namespace = settings.namespace or (await kube.login.current()).namespace
        leadership = Leadership(kube, namespace, identity, settings.lease_s)
        await _Operator(settings, namespace, kube, leadership).run(sock)
    finally:
        await kube.close()


class _Operator:
    """One process: waits until it leads, then watches and reconciles for as long as it does."""

    def __init__(self, settings: OperatorSettings, namespace: str, kube: Kube, leadership: Leadership) -> None:
        self._settings, self._namespace, self._kube, self._leadership = settings, namespace, kube, leadership
        self._telemetry = Telemetry()
        self._stop = asyncio.Event()

    async def run(self, sock: socket.socket) -> None:
        stop_on_signals(self._stop)
        server = await serve(self._telemetry, sock)
        background = {"the HTTP port": watch_port(sock), "the operator": self._lead()}
        try:
            await run_with_background(self._stop.wait(), background)
        finally:
            server.close()

    async def _lead(self) -> None:
        """Wait for leadership, then act; when this is cancelled, another operator may lead at once."""
        await self._leadership.acquire()
        self._telemetry.leads(True)
        try:
            await run_with_background(self._act(), {"leadership": self._leadership.keep()})
        except asyncio.CancelledError:
            await self._leadership.release()
            raise

    async def _act(self) -> None:
        await wait_for_own_kinds(self._kube)
        facts = await discover(self._kube, self._settings.image)
        logger.info("watching %s; %s", self._watched, facts)
        loop = ReconcileLoop(self._kube, facts, resync_s=self._settings.resync_s, telemetry=self._telemetry)
        await run_with_background(loop.run(), {"the watch of the cluster": self._watch(loop)})

    async def _watch(self, loop: ReconcileLoop) -> None:
        others = asyncio.all_tasks()  # kopf cancels at its end what it does not know
        tasks = await kopf.spawn_tasks(
            registry=make_registry(loop, self._kube.login),
            settings=make_settings(),
            standalone=True,
            clusterwide=self._settings.all_namespaces,
            namespaces=[] if self._settings.all_namespaces else [self._namespace],
        )
        stop_on_signals(self._stop)  # kopf has taken them over
        await kopf.run_tasks(tasks, ignored=others)
        self._stop.set()  # kopf ends of itself only by a signal that it caught before this process did

    @property
    def _watched(self) -> str:
        return "all namespaces" if self._settings.all_namespaces else self._namespace
