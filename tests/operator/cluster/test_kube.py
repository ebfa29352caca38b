"""The operator's client, its Lease and its queue, against a small API server that throttles and conflicts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pdserve.operator.cluster.credentials import ClusterError, Credentials
from pdserve.operator.cluster.kube import ConflictError, GoneError, Kube, RefusedError, path_of
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.handlers import make_settings
from pdserve.operator.leader import Leadership
from pdserve.operator.loop import ReconcileLoop
from pdserve.operator.objects.children import Children
from pdserve.operator.objects.plan import with_owner
from pdserve.operator.telemetry import Telemetry
from pdserve.operator.work_queue import WorkQueue

Json = dict[str, Any]


class ApiServer:
    """Objects by path, with optimistic concurrency; `answers` are given first, whatever is asked."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.requests: list[tuple[str, str]] = []
        self.version = 0
        self.hangs_s = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.hangs_s)
        self.requests.append((request.method, request.path))
        if self.answers:
            status, headers = self.answers.pop(0)
            return web.json_response({"message": f"said {status}"}, status=status, headers=headers)
        return getattr(self, request.method.lower())(
            request.path, await request.json() if request.can_read_body else {}
        )

    def get(self, path: str, _: Json) -> web.Response:
        found = self.objects.get(path)
        return web.json_response(found or {"message": "not found"}, status=200 if found else 404)

    def post(self, path: str, body: Json) -> web.Response:
        path = f"{path}/{body['metadata']['name']}"
        if path in self.objects:
            return web.json_response({"message": "already exists"}, status=409)
        return self._store(path, body)

    def put(self, path: str, body: Json) -> web.Response:
        if self.objects[path]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            return web.json_response({"message": "the object has been modified"}, status=409)
        return self._store(path, body)

    def patch(self, path: str, body: Json) -> web.Response:
        return self._store(path, body)

    def _store(self, path: str, body: Json) -> web.Response:
        self.version += 1
        self.objects[path] = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        return web.json_response(self.objects[path])


@asynccontextmanager
async def running() -> AsyncIterator[tuple[ApiServer, Kube]]:
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kube = Kube(Credentials(f"http://127.0.0.1:{port}", None, False, None, None, None, "default"))
    try:
        yield server, kube
    finally:
        await kube.close()
        await runner.cleanup()


POD = path_of("v1", "Pod", "shop", "p")


async def test_throttling_is_waited_out_as_the_server_asks() -> None:
    async with running() as (server, kube):
        server.objects[POD] = {"metadata": {"name": "p"}}
        server.answers = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
        assert await kube.get(POD) == {"metadata": {"name": "p"}}
        assert len(server.requests) == 3


async def test_throttling_without_end_is_an_error_after_a_bounded_number_of_tries() -> None:
    async with running() as (server, kube):
        server.answers = [(429, {"Retry-After": "0"})] * 20
        with pytest.raises(ClusterError, match="said 429 4 times"):
            await kube.get(POD)


@pytest.mark.parametrize(
    ("status", "error"), [(404, GoneError), (409, ConflictError), (422, RefusedError), (403, RefusedError)]
)
async def test_other_refusals_are_told_apart_and_not_repeated(status: int, error: type[ClusterError]) -> None:
    async with running() as (server, kube):
        server.answers = [(status, {})]
        with pytest.raises(error):
            await kube.get(POD)
        assert len(server.requests) == 1


async def test_a_server_that_is_away_is_a_cluster_error() -> None:
    async with running() as (_, kube):
        pass
    kube = Kube(Credentials("http://127.0.0.1:1", None, False, None, None, None, "default"))
    with pytest.raises(ClusterError, match="does not answer"):
        await kube.get(POD)
    await kube.close()


async def test_deleting_what_is_gone_is_no_error() -> None:
    async with running() as (server, kube):
        server.answers = [(404, {})]
        await kube.delete(POD)


async def test_the_same_object_is_applied_once() -> None:
    async with running() as (server, kube):
        owner = Owner("chat", "shop", "u")
        children = Children(kube, owner, ClusterFacts())
        item = with_owner(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}, owner
        )
        assert await children.apply(item)
        assert not await children.apply(item)
        assert await children.apply(with_owner(item | {"data": {"a": "2"}}, owner))
        assert [method for method, _ in server.requests] == ["PATCH", "PATCH"]


async def test_a_drawn_password_is_never_drawn_again() -> None:
    async with running() as (server, kube):
        path = path_of("v1", "Secret", "shop", "chat-redis")
        await Children(kube, Owner("chat", "shop", "u"), ClusterFacts()).ensure_password()
        drawn = server.objects[path]
        await Children(kube, Owner("chat", "shop", "u"), ClusterFacts()).ensure_password()
        assert server.objects[path] == drawn


async def test_one_of_two_holds_the_lease_and_the_other_takes_over() -> None:
    async with running() as (_, kube):
        first, second = (Leadership(kube, "shop", name, 0.4) for name in ("first", "second"))
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(1.0)
        assert not waiting.done(), "a renewed Lease is not free"
        keeping.cancel()
        await asyncio.wait_for(waiting, 5)
        with pytest.raises(asyncio.CancelledError):
            await keeping


async def test_a_released_lease_is_free_at_once() -> None:
    async with running() as (_, kube):
        first, second = (Leadership(kube, "shop", name, 60.0) for name in ("first", "second"))
        await first.acquire()
        await first.release()
        await asyncio.wait_for(second.acquire(), 1)


async def test_who_lost_the_lease_stops() -> None:
    async with running() as (server, kube):
        first = Leadership(kube, "shop", "first", 0.3)
        await first.acquire()
        path = path_of("coordination.k8s.io/v1", "Lease", "shop", "pdserve-operator")
        server.objects[path]["spec"]["holderIdentity"] = "thief"
        await asyncio.wait_for(first.keep(), 5)


@pytest.mark.alone
async def test_a_lease_that_can_not_be_renewed_is_given_up_before_another_may_take_it() -> None:
    async with running() as (server, kube):
        first = Leadership(kube, "shop", "first", 0.6)
        await first.acquire()
        server.answers = [(403, {})] * 100
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(first.keep(), 5)
        assert asyncio.get_running_loop().time() - began_s < 1.2


@pytest.mark.alone
async def test_a_lease_is_given_up_in_time_when_the_server_hangs() -> None:
    async with running() as (server, kube):
        first = Leadership(kube, "shop", "first", 0.6)
        await first.acquire()
        server.hangs_s = 3.0
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(first.keep(), 5)
        assert asyncio.get_running_loop().time() - began_s < 1.5
        server.hangs_s = 0.0


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


async def test_a_key_is_never_taken_twice_at_the_same_time() -> None:
    now_s = [0.0]
    queue = WorkQueue(lambda: now_s[0])
    await queue.add(("a", "x"))
    assert await queue.take() == ("a", "x")
    await queue.add(("a", "x"))
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    await queue.done(("a", "x"))
    assert await asyncio.wait_for(taking, 1) == ("a", "x")


async def test_whoever_waits_for_a_key_can_be_cancelled_at_any_moment() -> None:
    async def work(queue: WorkQueue) -> None:
        while True:
            key = await queue.take()
            await queue.done(key)
            await queue.add(key, 0.001)

    for attempt in range(200):
        queue = WorkQueue(time.monotonic)
        workers = [asyncio.create_task(work(queue)) for _ in range(8)]
        await queue.add(("shop", "chat"))
        await asyncio.sleep(attempt * 1e-5)
        for worker in workers:
            worker.cancel()
        _, left = await asyncio.wait(workers, timeout=5)
        assert not left
        await asyncio.wait_for(queue.add(("shop", "other")), 5)


async def test_the_earlier_time_wins_and_due_keys_come_in_order() -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    await queue.add(("a", "late"), 0.2)
    await queue.add(("a", "soon"), 60)
    await queue.add(("a", "soon"), 0.05)
    await queue.add(("a", "soon"), 60)
    assert [await asyncio.wait_for(queue.take(), 1) for _ in range(2)] == [("a", "soon"), ("a", "late")]


def test_paths_are_those_of_the_api() -> None:
    assert path_of("v1", "Pod", "shop", "p") == "/api/v1/namespaces/shop/pods/p"
    assert path_of("networking.k8s.io/v1", "NetworkPolicy", "shop") == (
        "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies"
    )
    assert path_of("apps/v1", "Deployment", None) == "/apis/apps/v1/deployments"


async def test_requests_that_are_refused_together_read_new_credentials_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (server, kube):
        server.objects[POD] = {"metadata": {"name": "p"}}
        server.answers = [(401, {})] * 3
        times_read = []

        def read() -> Credentials:
            times_read.append(1)
            return kube._credentials

        monkeypatch.setattr("pdserve.operator.cluster.kube.read_credentials", read)
        found = await asyncio.gather(*(kube.get(POD) for _ in range(3)))
        assert found == [{"metadata": {"name": "p"}}] * 3
        assert len(times_read) == 1
