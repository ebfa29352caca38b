"""A test-only node agent: starts the containers of Pods bound to its Node as local processes.

    python process_node.py KUBECONFIG FOLDER --name node-a --cpu 32 --memory 64Gi --gpus 0 --first-address 10.88.1.1

It registers the Node, gives every Pod a network namespace on the cluster's bridge, volumes, environment, probes,
preStop and grace period, reports status, and keeps a hosts file with Service names (there is no DNS and no proxy: a
name leads to one ready endpoint). Logs lie in FOLDER/logs. It never pulls an image: commands are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster.network import NODE_IP
from cluster.pod_sandbox import NotYetError, Sandbox
from cluster.process_container import Container, now
from pdserve.local.redis_server import find_server_binary
from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import GoneError, Kube, path_of
from pdserve.operator.cluster.login import ClusterLogin

Json = dict[str, Any]

_POLL_S = 0.15
_MANAGER = "process-node"
_DOMAINS = ("", ".{0}", ".{0}.svc", ".{0}.svc.cluster.local")


class PodRunner:
    """One Pod from its binding to its end."""

    def __init__(self, node: Node, pod: Json, address: str) -> None:
        metadata = pod["metadata"]
        self.pod, self._node = pod, node
        self._path = path_of("v1", "Pod", metadata["namespace"], metadata["name"])
        name = f"{node.prefix}-{address.replace('.', '-')[-9:]}"
        self.sandbox = Sandbox(name, address, node.folder / "pods" / metadata["uid"], node.models)
        self._dirty = asyncio.Event()
        self._containers: list[Container] = []
        self._creating: Json = {"waiting": {"reason": "ContainerCreating"}}
        self._reported: Json = {}
        self._ready_since = self._started_at = now()
        self._was_ready = False
        self.is_ending = False
        self.tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._report_for_ever())]

    async def _run(self) -> None:
        self.sandbox.open()
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        self._node.write_hosts(self)
        while True:
            try:
                await self.sandbox.fill_volumes(spec, self._fetch)
                break
            except NotYetError:
                self._dirty.set()
                await asyncio.sleep(0.5)
        logs = self._node.folder / "logs"
        self._containers = [
            Container(
                self.pod,
                container,
                self.sandbox,
                self._fetch,
                logs / f"{metadata['namespace']}.{metadata['name']}.{container['name']}.log",
                self._node.base_env(),
                self._dirty.set,
            )
            for container in spec["containers"]
        ]
        self._dirty.set()
        await asyncio.gather(*(container.run() for container in self._containers))

    async def _fetch(self, kind: str, name: str) -> Json | None:
        try:
            return await self._node.kube.get(path_of("v1", kind, self.pod["metadata"]["namespace"], name))
        except GoneError:
            return None

    async def end(self, grace_s: float) -> None:
        """Stop everything, and tell the API server that the Pod is gone."""
        self.is_ending = True
        await asyncio.gather(*(container.stop(grace_s) for container in self._containers))
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        with contextlib.suppress(GoneError):
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.pod["metadata"]["uid"]}}
            await self._node.kube._request("DELETE", self._path, body)
        self.sandbox.close()

    async def _report_for_ever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            status = self._status()
            if status != self._reported:
                try:
                    await self._node.kube.merge(f"{self._path}/status", {"status": status}, _MANAGER)
                    self._reported = status
                except GoneError:
                    return
                except ClusterError:
                    self._dirty.set()
                    await asyncio.sleep(0.5)

    def _status(self) -> Json:
        containers = [container.status for container in self._containers] or [
            {"name": spec["name"], "image": spec["image"], "imageID": "", "ready": False, "started": False,
             "restartCount": 0, "state": self._creating}
            for spec in self.pod["spec"]["containers"]
        ]  # fmt: skip
        is_ready = bool(self._containers) and all(container.is_ready for container in self._containers)
        if is_ready != self._was_ready:
            self._was_ready, self._ready_since = is_ready, now()
        has_run = any("running" in c["state"] or c["restartCount"] or c.get("lastState") for c in containers)
        conditions = [
            {"type": kind, "status": status, "lastTransitionTime": since}
            for kind, status, since in (
                ("Initialized", "True", self._started_at),
                ("PodScheduled", "True", self._started_at),
                ("ContainersReady", str(is_ready), self._ready_since),
                ("Ready", str(is_ready), self._ready_since),
            )
        ]
        status: Json = {
            "phase": "Running" if has_run else "Pending", "startTime": self._started_at, "hostIP": NODE_IP,
            "conditions": conditions, "containerStatuses": containers,
        }  # fmt: skip
        if self._containers:
            status |= {"podIP": self.sandbox.address, "podIPs": [{"ip": self.sandbox.address}]}
        return status


class Node:
    """One Node and its Pods."""

    def __init__(self, kube: Kube, folder: Path, options: argparse.Namespace) -> None:
        self.kube, self.folder = kube, folder
        self.prefix = f"pds{os.getpid() % 100000}"
        self._options = options
        self.models: Path | None = options.models
        self._next_address = ipaddress.IPv4Address(options.first_address)
        self._runners: dict[str, PodRunner] = {}
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._names: dict[str, dict[str, str]] = {}
        """Namespace → host name → address."""
        self._path = folder / "bin"

    def base_env(self) -> dict[str, str]:
        """What an image would bring."""
        paths = [str(self._path), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            "PATH": ":".join(paths), "KUBERNETES_SERVICE_HOST": NODE_IP, "KUBERNETES_SERVICE_PORT": "6443",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "HOME": "/root",
        }  # fmt: skip

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop; then every Pod's processes are killed."""
        for name in ("logs", "pods", "bin"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        server = self._path / "valkey-server"
        if not server.exists():
            server.symlink_to(shutil.which(find_server_binary()) or find_server_binary())
        await self._register()
        while not stop.is_set():
            try:
                await self._sync()
            except ClusterError as error:
                print(f"sync: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)
        for task in self._endings.values():
            task.cancel()
        await asyncio.gather(*(runner.end(0) for runner in self._runners.values()), return_exceptions=True)

    async def _register(self) -> None:
        name, options = self._options.name, self._options
        labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": "zone-a"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        with contextlib.suppress(ClusterError):
            await self.kube.create(path_of("v1", "Node", None), node)
        path = path_of("v1", "Node", None, name)
        capacity = {"cpu": options.cpu, "memory": options.memory, "pods": "500", "nvidia.com/gpu": options.gpus}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now()}
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
        status["addresses"] = [{"type": "InternalIP", "address": NODE_IP}]  # type: ignore[assignment]
        await self.kube.merge(f"{path}/status", {"status": status}, _MANAGER)
        await self.kube.merge(path, {"spec": {"taints": None}}, _MANAGER)

    async def _sync(self) -> None:
        found = await self.kube._request(
            "GET", "/api/v1/pods", params={"fieldSelector": f"spec.nodeName={self._options.name}"}
        )
        pods = {pod["metadata"]["uid"]: pod for pod in found["items"]}
        for uid, pod in pods.items():
            if uid not in self._runners and "deletionTimestamp" not in pod["metadata"]:
                self._runners[uid] = PodRunner(self, pod, self._address())
            elif uid in self._runners and "deletionTimestamp" in pod["metadata"] and uid not in self._endings:
                self._endings[uid] = asyncio.create_task(self._end(uid, pod["metadata"]["deletionGracePeriodSeconds"]))
            elif uid not in self._runners:
                await self.kube._request(
                    "DELETE",
                    path_of("v1", "Pod", pod["metadata"]["namespace"], pod["metadata"]["name"]),
                    {"gracePeriodSeconds": 0},
                )
        for uid in self._runners.keys() - pods.keys() - self._endings.keys():
            self._endings[uid] = asyncio.create_task(self._end(uid, 0))
        await self._refresh_names()

    async def _end(self, uid: str, grace_s: float) -> None:
        await self._runners[uid].end(grace_s)
        del self._runners[uid], self._endings[uid]

    def _address(self) -> str:
        self._next_address += 1
        return str(self._next_address)

    async def _refresh_names(self) -> None:
        names: dict[str, dict[str, str]] = {}
        for endpoints in (await self.kube.get("/api/v1/endpoints"))["items"]:
            name, namespace = endpoints["metadata"]["name"], endpoints["metadata"]["namespace"]
            addresses = [a["ip"] for subset in endpoints.get("subsets", []) for a in subset.get("addresses", [])]
            if addresses:
                for domain in _DOMAINS:
                    names.setdefault(namespace, {})[name + domain.format(namespace)] = min(addresses)
        self._names = names
        for runner in self._runners.values():
            if runner.sandbox.hosts.exists():
                self.write_hosts(runner)

    def write_hosts(self, runner: PodRunner) -> None:
        """Names of the Pod's own namespace, and of others with their namespace."""
        runner.sandbox.write_hosts(self._names.get(runner.pod["metadata"]["namespace"], {}))


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kubeconfig")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="node-a")
    parser.add_argument("--cpu", default="64")
    parser.add_argument("--memory", default="256Gi")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--models", type=Path, help="folder of converted models, for empty volumes named cache")
    parser.add_argument("--first-address", default="10.88.1.1")
    options = parser.parse_args()
    os.environ["KUBECONFIG"] = options.kubeconfig
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kube = Kube(ClusterLogin())
    started_s = time.monotonic()
    await Node(kube, options.folder, options).run(stop)
    await kube.close()
    print(f"ended after {time.monotonic() - started_s:.0f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
