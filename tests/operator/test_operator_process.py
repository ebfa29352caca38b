"""A real operator process against a small API server: how it ends when told to, and when it must not act any more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdserve.operator.leader import LEASE_NAME
from pdserve.operator.names import API_VERSION, GROUP, VERSION

Json = dict[str, Any]
NAMESPACE = "shop"
KINDS = {
    f"/apis/{API_VERSION}": {"pdservices": "PDService", "scalingpolicies": "ScalingPolicy"},
    "/apis/apps/v1": {"deployments": "Deployment"},
    "/apis/apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "/api/v1": {"namespaces": "Namespace"},
}


class ApiServer:
    """Answers discovery, the Lease and empty lists; watches stay open, `watching` is set by the first."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.watching = asyncio.Event()
        self.has_kinds = True

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if "/leases" in path:
            return await self._handle_lease(request)
        if path == "/version":
            return web.json_response({"major": "1", "minor": "30"})
        if path in KINDS and self.has_kinds:
            verbs = ["get", "list", "watch", "patch"]
            resources = [
                {"name": name, "kind": kind, "singularName": kind.lower(), "namespaced": True, "verbs": verbs}
                for name, kind in KINDS[path].items()
            ]
            return web.json_response({"resources": resources})
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            groups = [(GROUP, VERSION), ("apps", "v1"), ("apiextensions.k8s.io", "v1")]
            versions = [[{"groupVersion": f"{group}/{version}", "version": version}] for group, version in groups]
            listed = [
                {"name": name, "versions": version, "preferredVersion": version[0]}
                for (name, _), version in zip(groups, versions, strict=True)
            ]
            return web.json_response({"groups": listed})
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            self.watching.set()
            await asyncio.sleep(3600)
            return response
        if path.rsplit("/", 1)[-1] in ("pdservices", "scalingpolicies", "deployments"):
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        return web.json_response({"message": "not found"}, status=404)

    async def _handle_lease(self, request: web.Request) -> web.Response:
        if request.method in ("POST", "PUT"):
            self.lease = await request.json()
            self.lease["metadata"]["resourceVersion"] = "1"
        if self.lease is None:
            return web.json_response({"message": "not found"}, status=404)
        assert request.method == "POST" or request.path.endswith(LEASE_NAME), request.path
        return web.json_response(self.lease)

    async def until_led(self) -> None:
        while not self.holder:  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.02)


SIGNALLED_EARLY = """
import asyncio, os, signal, sys
import kopf
from pdserve.cli import run

spawn_tasks = kopf.spawn_tasks

async def spawn_then_signal(**arguments):
    tasks = await spawn_tasks(**arguments)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    while not any(task.done() for task in tasks):  # the library acts on the signal
        await asyncio.sleep(0.01)
    return tasks

kopf.spawn_tasks = spawn_then_signal
sys.exit(run("operator", sys.argv[2:]))
"""


@asynccontextmanager
async def operator(
    folder: Path, server: ApiServer, *flags: str, command: tuple[str, ...] = ("-m", "pdserve", "operator")
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process and what it talks to; killed when the test is over."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = folder / "config"
    config.write_text(json.dumps(_kubeconfig(runner.addresses[0][1])))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--host", "127.0.0.1", "--lease-s", "0.9", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "KUBECONFIG": str(config)},
    )
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await runner.cleanup()


def _kubeconfig(port: int) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": NAMESPACE}}],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "it", "user": {}}],
    }


async def errors_of(process: asyncio.subprocess.Process) -> str:
    return (await process.communicate())[1].decode()


async def test_a_signal_while_it_watches_ends_it_well_and_another_may_lead_at_once(tmp_path: Path) -> None:
    server = ApiServer()
    async with operator(tmp_path, server) as process:
        await server.watching.wait()
        assert server.holder
        process.send_signal(signal.SIGTERM)
        errors = await errors_of(process)
        assert (process.returncode, server.holder) == (0, ""), errors
        assert "Traceback" not in errors


async def test_a_signal_while_it_waits_for_its_kinds_ends_it_well(tmp_path: Path) -> None:
    server = ApiServer()
    server.has_kinds = False
    async with operator(tmp_path, server) as process:
        await server.until_led()
        process.send_signal(signal.SIGINT)
        errors = await errors_of(process)
        assert (process.returncode, server.holder) == (0, ""), errors


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
async def test_a_signal_that_its_library_catches_ends_it_well_too(tmp_path: Path, name: str) -> None:
    server = ApiServer()
    async with operator(tmp_path, server, command=("-c", SIGNALLED_EARLY, name)) as process:
        errors = await errors_of(process)
        assert (process.returncode, server.holder) == (0, ""), errors
        assert server.lease is not None, "it led before"


async def test_an_operator_that_does_not_lead_any_more_ends_with_the_reason(tmp_path: Path) -> None:
    server = ApiServer()
    async with operator(tmp_path, server) as process:
        await server.watching.wait()
        assert server.lease is not None
        server.lease["spec"]["holderIdentity"] = "another"
        errors = await errors_of(process)
        assert process.returncode == 1
        assert errors.strip().splitlines()[-1].startswith("pdserve operator: leadership has ended")
        assert server.holder == "another"


async def test_a_port_that_is_taken_is_one_readable_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with operator(tmp_path, ApiServer(), "--metrics-port", port) as process:
            errors = await errors_of(process)
    assert process.returncode == 2
    assert errors.strip().startswith(
        f"pdserve operator: setting METRICS_PORT: got {port}, expected a port that is free"
    )


async def test_a_second_signal_ends_it_at_once_although_its_library_took_the_signals(tmp_path: Path) -> None:
    server = ApiServer()
    async with operator(tmp_path, server) as process:
        await server.watching.wait()
        process.send_signal(signal.SIGSTOP)  # so that both arrive before anything else happens
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        assert await process.wait() in (128 + signal.SIGTERM, 128 + signal.SIGINT)
        assert server.holder
