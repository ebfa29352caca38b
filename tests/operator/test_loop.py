"""When services are looked at, and when no longer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from api_server import running

from pdserve.operator.cluster.kube import path_of
from pdserve.operator.facts import ClusterFacts
from pdserve.operator.handlers import make_settings
from pdserve.operator.loop import ReconcileLoop
from pdserve.operator.telemetry import Telemetry


async def test_a_service_that_is_gone_is_forgotten_without_retries() -> None:
    async with running() as (server, kube):
        loop = ReconcileLoop(kube, ClusterFacts(), resync_s=30, telemetry=Telemetry())
        running_loop = asyncio.create_task(loop.run())
        await loop.queue.add(("shop", "chat"))
        await asyncio.sleep(0.5)
        running_loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_loop
        assert len(server.requests) == 2, "asked for, and asked whether it still exists"


async def test_an_object_being_deleted_is_left_alone() -> None:
    async with running() as (server, kube):
        path = path_of("pdserve.dev/v1alpha1", "PDService", "shop", "chat")
        server.objects[path] = {"metadata": {"name": "chat", "namespace": "shop", "uid": "u", "deletionTimestamp": "t"}}
        loop = ReconcileLoop(kube, ClusterFacts(), resync_s=30, telemetry=Telemetry())
        running_loop = asyncio.create_task(loop.run())
        await loop.queue.add(("shop", "chat"))
        await asyncio.sleep(0.3)
        running_loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_loop
        assert server.requests == [("GET", path)]


async def test_a_service_is_looked_at_again_although_no_event_ever_comes() -> None:
    async with running() as (server, kube):
        path = path_of("pdserve.dev/v1alpha1", "PDService", "shop", "chat")
        metadata = {"name": "chat", "namespace": "shop", "uid": "u", "generation": 1}
        server.objects[path] = {"metadata": metadata, "spec": {}}
        loop = ReconcileLoop(kube, ClusterFacts(), resync_s=0.1, telemetry=Telemetry())
        running_loop = asyncio.create_task(loop.run())
        await loop.queue.add(("shop", "chat"))
        async with asyncio.timeout(10):
            while server.requests.count(("GET", path)) < 4:  # noqa: ASYNC110  the server counts
                await asyncio.sleep(0.02)
        running_loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_loop


def test_a_watch_is_never_trusted_for_ever() -> None:
    settings = make_settings()
    assert settings.watching.server_timeout is not None
    assert settings.watching.client_timeout is not None
    assert settings.watching.server_timeout < settings.watching.client_timeout
    assert settings.peering.standalone
    assert not settings.posting.enabled


def test_without_a_cluster_it_says_what_to_set() -> None:
    command = [sys.executable, "-m", "pdserve.operator"]
    env = os.environ | {"KUBECONFIG": "/nowhere/config"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "set KUBECONFIG or run in a pod" in done.stderr
