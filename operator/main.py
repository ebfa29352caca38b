"""Runs one operator process: lead, watch, reconcile, until SIGTERM or until another one leads."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket

import kopf

from pdserve.log import get_logger, setup_logging
from pdserve.operator.cluster.discovery import discover, wait_for_own_kinds
from pdserve.operator.cluster.kube import Kube
from pdserve.operator.cluster.login import ClusterLogin
from pdserve.operator.handlers import make_registry, make_settings
from pdserve.operator.leader import Leadership
from pdserve.operator.loop import ReconcileLoop
from pdserve.operator.settings import OperatorSettings
from pdserve.operator.telemetry import Telemetry, serve
from pdserve.settings import load

logger = get_logger(__name__)

_LEADERSHIP_LOST = 1
"""Index of the coroutine that keeps it."""


def main(argv: list[str]) -> int:
    """Exit status 0 after SIGTERM; 1 when leadership was lost, so that whoever started it starts it again."""
    settings = load(OperatorSettings, argv, os.environ)
    identity = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    setup_logging(settings.log_level, settings.log_format, process=f"operator {identity}")
    return asyncio.run(_run(settings, identity))


async def _run(settings: OperatorSettings, identity: str) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kube = Kube(ClusterLogin())
    namespace = settings.namespace or (await kube.login.current()).namespace
    telemetry = Telemetry()
    server = await serve(telemetry, settings.host, settings.metrics_port)
    leadership = Leadership(kube, namespace, identity, settings.lease_s)
    try:
        if await _first(leadership.acquire(), stop.wait()) == 1:
            return 0
        telemetry.leads(True)
        lost = await _lead(settings, namespace, kube, leadership, telemetry, stop)
        if not lost:
            await leadership.release()
        return 1 if lost else 0
    finally:
        server.close()
        await kube.close()


async def _lead(
    settings: OperatorSettings,
    namespace: str,
    kube: Kube,
    leadership: Leadership,
    telemetry: Telemetry,
    stop: asyncio.Event,
) -> bool:
    """Act until told to stop; whether leadership was lost."""
    first = await _first(stop.wait(), leadership.keep(), wait_for_own_kinds(kube))
    if first in (0, _LEADERSHIP_LOST):
        return first == _LEADERSHIP_LOST
    facts = await discover(kube, settings.image)
    logger.info("watching %s; %s", "all namespaces" if settings.all_namespaces else namespace, facts)
    loop = ReconcileLoop(kube, facts, resync_s=settings.resync_s, telemetry=telemetry)
    watching = kopf.operator(
        registry=make_registry(loop, kube.login),
        settings=make_settings(),
        standalone=True,
        clusterwide=settings.all_namespaces,
        namespaces=[] if settings.all_namespaces else [namespace],
    )
    # kopf takes over the signals while it runs, and ends when one comes: that is no loss.
    return await _first(stop.wait(), leadership.keep(), watching, loop.run()) == _LEADERSHIP_LOST


async def _first(*coroutines: object) -> int:
    """Index of the coroutine that ends first; the others are cancelled. Its exception is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(index for index, task in enumerate(tasks) if task in done)
        tasks[first].result()
        return first
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
