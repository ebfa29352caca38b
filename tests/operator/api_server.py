"""A small Kubernetes API server in this process, over HTTP: objects by path, label selectors, apply, deletion.

It keeps what the operator relies on: resourceVersion and generation, one entry of managedFields for each manager,
the status as a subresource of its own, children that go with their owner. It validates nothing.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from pdserve.operator.cluster.credentials import Credentials
from pdserve.operator.cluster.kube import Kube

Json = dict[str, Any]

READS = ("GET",)


class FixedLogin:
    """One set of credentials, and how often it was read anew."""

    def __init__(self, server: str) -> None:
        self._current = Credentials(server)
        self.num_renewals = 0

    async def current(self) -> Credentials:
        return self._current

    async def renew(self, refused: Credentials) -> Credentials:
        if refused is self._current:
            self.num_renewals += 1
            self._current = copy.copy(refused)
        return self._current


class ApiServer:
    """Objects by path; `answers` are given first, whatever is asked."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.requests: list[tuple[str, str]] = []
        self.hangs_s = 0.0
        self._versions = itertools.count(1)

    # --- what tests ask

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path in self.requests if method not in READS]

    def named(self, kind: str, namespace: str = "shop") -> dict[str, Json]:
        """Objects by name of a collection such as `deployments`."""
        found = {path: item for path, item in self.objects.items() if f"/namespaces/{namespace}/{kind}/" in path}
        return {path.rsplit("/", 1)[1]: item for path, item in found.items()}

    def put_object(self, path: str, item: Json) -> Json:
        """Store an object, as a person or a controller does."""
        before = self.objects.get(path, {})
        metadata = {"generation": 0, "uid": f"uid-{path}"} | before.get("metadata", {}) | item["metadata"]
        if item.get("spec") != before.get("spec"):
            metadata["generation"] += 1
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[path] = copy.deepcopy(item | {"metadata": metadata})
        return self.objects[path]

    def delete_object(self, path: str) -> None:
        """Delete an object and, as the garbage collector does, what it owns."""
        uid = self.objects.pop(path)["metadata"]["uid"]
        for child in [child for child, item in self.objects.items() if uid in _owners(item)]:
            if child in self.objects:
                self.delete_object(child)

    # --- HTTP

    async def handle(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.hangs_s)
        self.requests.append((request.method, request.path))
        if self.answers:
            status, headers = self.answers.pop(0)
            return web.json_response({"message": f"said {status}"}, status=status, headers=headers)
        body = await request.json() if request.can_read_body else {}
        match request.method:
            case "GET":
                return self._get(request)
            case "POST":
                return self._post(request.path, body)
            case "PUT":
                return self._put(request.path, body)
            case "PATCH":
                return self._patch(request, body)
            case _:
                return self._delete(request.path)

    def _get(self, request: web.Request) -> web.Response:
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        if "labelSelector" not in request.query:
            return web.json_response({"message": "not found"}, status=404)
        wanted = dict(pair.split("=") for pair in request.query["labelSelector"].split(","))
        collection = [item for path, item in self.objects.items() if path.rsplit("/", 1)[0] == request.path]
        items = [item for item in collection if wanted.items() <= item["metadata"].get("labels", {}).items()]
        return web.json_response({"items": items})

    def _post(self, path: str, body: Json) -> web.Response:
        path = f"{path}/{body['metadata']['name']}"
        if path in self.objects:
            return web.json_response({"message": "already exists"}, status=409)
        return web.json_response(self.put_object(path, body))

    def _put(self, path: str, body: Json) -> web.Response:
        if self.objects[path]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            return web.json_response({"message": "the object has been modified"}, status=409)
        return web.json_response(self.put_object(path, body))

    def _patch(self, request: web.Request, body: Json) -> web.Response:
        path = request.path.removesuffix("/status")
        before = self.objects.get(path, {"metadata": {}})
        if path != request.path:
            return web.json_response(self.put_object(path, before | {"status": body["status"]}))
        made = merged(before, body)
        if "apply-patch" in request.content_type:
            _own(made, request.query["fieldManager"], body)
        if made.get("kind") == "Deployment":
            made["spec"].setdefault("replicas", 1)
        return web.json_response(self.put_object(path, made))

    def _delete(self, path: str) -> web.Response:
        if path not in self.objects:
            return web.json_response({"message": "not found"}, status=404)
        self.delete_object(path)
        return web.json_response({})


def merged(before: Json, change: Json) -> Json:
    """Maps merge; everything else is replaced."""
    both = dict(before)
    for name, value in change.items():
        both[name] = merged(both.get(name, {}), value) if isinstance(value, dict) else value
    return both


def _own(item: Json, manager: str, body: Json) -> None:
    fields = {"f:spec": {"f:replicas": {}}} if "replicas" in body.get("spec", {}) else {}
    others = [entry for entry in item["metadata"].get("managedFields", []) if entry["manager"] != manager]
    item["metadata"]["managedFields"] = [*others, {"manager": manager, "fieldsV1": fields}]


def _owners(item: Json) -> Iterator[str]:
    return (reference["uid"] for reference in item["metadata"].get("ownerReferences", []))


@asynccontextmanager
async def running() -> AsyncIterator[tuple[ApiServer, Kube]]:
    """A server, and a client of it."""
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kube = Kube(FixedLogin(f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        yield server, kube
    finally:
        await kube.close()
        await runner.cleanup()
