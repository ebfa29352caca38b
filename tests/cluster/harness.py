"""What cluster tests do with a cluster: kubectl, objects, waiting, requests through a Service's endpoints, load."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import yaml

from cluster.control_plane import ControlPlane

Json = dict[str, Any]
T = TypeVar("T")

ROOT = Path(__file__).parents[2]
POLL_S = 0.2


def wait_for(check: Callable[[], T], timeout_s: float, what: str, explain: Callable[[], object] = lambda: "") -> T:
    """Until `check` returns something true."""
    give_up_s = time.monotonic() + timeout_s
    while not (result := check()):
        assert time.monotonic() < give_up_s, f"not within {timeout_s:g} s: {what}\n{explain()}"
        time.sleep(POLL_S)
    return result


class Cluster:
    """One control plane, as its administrator."""

    def __init__(self, plane: ControlPlane, node_folder: Path) -> None:
        self.plane, self.node_folder = plane, node_folder
        self.client = plane.client()

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        env = os.environ | {"KUBECONFIG": str(self.plane.kubeconfig)}
        done = subprocess.run(
            ["kubectl", *words], env=env, input=stdin, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
        )
        assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout + done.stderr

    def get(self, path: str) -> Json:
        response = self.client.get(path)
        assert response.is_success, response.text
        return dict(response.json())

    def find(self, path: str) -> Json | None:
        response = self.client.get(path)
        return dict(response.json()) if response.is_success else None

    def namespace(self, name: str) -> Namespace:
        self.kubectl("create", "namespace", name)
        wait_for(lambda: self.find(f"/api/v1/namespaces/{name}/serviceaccounts/default"), 20, "its ServiceAccount")
        return Namespace(self, name)


class Namespace:
    """One namespace: the tests' unit of isolation."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        return self.cluster.kubectl("-n", self.name, *words, stdin=stdin, check=check)

    def apply(self, *objects: Json) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def patch(self, name: str, spec: Json) -> None:
        self.kubectl("patch", "pds", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def service(self, name: str) -> Json:
        return self.cluster.get(f"/apis/pdserve.dev/v1alpha1/namespaces/{self.name}/pdservices/{name}")

    def deployment(self, name: str) -> Json | None:
        return self.cluster.find(f"/apis/apps/v1/namespaces/{self.name}/deployments/{name}")

    def pods(self, role: str | None = None) -> list[Json]:
        pods = self.cluster.get(f"/api/v1/namespaces/{self.name}/pods")["items"]
        return [pod for pod in pods if role is None or pod["metadata"]["labels"].get("pdserve.dev/role") == role]

    def ready_pods(self, role: str) -> list[Json]:
        return [pod for pod in self.pods(role) if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]

    def condition(self, name: str, kind: str) -> Json:
        found = self.service(name).get("status", {}).get("conditions", [])
        return next((condition for condition in found if condition["type"] == kind), {})

    def is_settled(self, name: str) -> bool:
        service = self.service(name)
        status = service.get("status", {})
        ready = self.condition(name, "Ready")
        return bool(
            status.get("observedGeneration") == service["metadata"]["generation"] and ready.get("status") == "True"
        )

    def wait_settled(self, name: str, timeout_s: float = 120) -> None:
        wait_for(lambda: self.is_settled(name), timeout_s, f"{name} is Ready", lambda: self.explain(name))

    def wait_reason(self, name: str, kind: str, reason: str, timeout_s: float = 60) -> Json:
        def check() -> Json | None:
            condition = self.condition(name, kind)
            return condition if condition.get("reason") == reason else None

        return wait_for(check, timeout_s, f"{kind} has reason {reason}", lambda: self.explain(name)) or {}

    def explain(self, name: str) -> str:
        status = yaml.safe_dump(self.service(name).get("status", {}))
        logs = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in self.logs()]
        return "\n".join([status, self.kubectl("get", "deploy,pod", "-o", "wide"), *logs])

    def logs(self) -> list[Path]:
        folder = self.cluster.node_folder / "logs"
        return sorted([*folder.glob(f"{self.name}.*.log"), *folder.glob("pdserve-system.*.log")])

    def endpoints(self, service: str) -> list[str]:
        """`ip:port` of every ready pod behind a Service."""
        found = self.cluster.get(f"/api/v1/namespaces/{self.name}/endpoints/{service}")
        return [
            f"{address['ip']}:{subset['ports'][0]['port']}"
            for subset in found.get("subsets", [])
            for address in subset.get("addresses", [])
        ]

    def events(self, name: str) -> list[str]:
        found = self.cluster.get(f"/api/v1/namespaces/{self.name}/events")["items"]
        return [event["reason"] for event in found if event["involvedObject"]["name"] == name]


def is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def pdservice(name: str, **spec: Any) -> Json:
    """A service that starts in seconds: the tiny model, small block pools, short drains."""
    engine = {"executor": "cpu", "numBlocks": 256, "threads": 1}
    pool = {"engine": engine, "drainSeconds": 30, "resources": {"requests": {"cpu": "1"}}}
    base: Json = {
        "model": {"source": "tiny"},
        "gateway": {"drainSeconds": 20},
        "prefill": dict(pool),
        "decode": dict(pool),
    }
    for field_name, value in spec.items():
        base[field_name] = base.get(field_name, {}) | value if isinstance(value, dict) else value
    return {"apiVersion": "pdserve.dev/v1alpha1", "kind": "PDService", "metadata": {"name": name}, "spec": base}


@dataclass(frozen=True)
class Answer:
    """One streamed completion."""

    prompt: str
    text: str
    error: str
    is_finished: bool


def ask(address: str, prompt: str, max_tokens: int, timeout_s: float = 90, **more: Any) -> Answer:
    """A greedy completion over SSE."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True} | more
    text, finish = "", ""
    try:
        with httpx.stream("POST", f"http://{address}/v1/completions", json=body | {"model": _model(address)},
                          timeout=timeout_s, trust_env=False) as response:  # fmt: skip
            if response.status_code != 200:
                return Answer(prompt, "", f"{response.status_code} {response.read().decode()}", False)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return Answer(prompt, text, json.dumps(event["error"]), False)
                    for choice in event["choices"]:
                        text += choice["text"]
                        finish = choice["finish_reason"] or finish
    except httpx.HTTPError as error:
        return Answer(prompt, text, repr(error), False)
    return Answer(prompt, text, "", bool(finish))


def _model(address: str) -> str:
    return str(httpx.get(f"http://{address}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"])


@dataclass
class Load:
    """Clients that ask again and again through a Service's endpoints, until the block ends."""

    namespace: Namespace
    service: str
    num_clients: int
    max_tokens: int
    prompts: list[str]
    pause_s: float = 0.05
    answers: list[Answer] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._ask_for_ever, args=(seed,)) for seed in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask_for_ever(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            address = chance.choice(self.namespace.endpoints(self.service))
            self.answers.append(ask(address, chance.choice(self.prompts), self.max_tokens))
            self._stop.wait(self.pause_s)

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error or not answer.is_finished]
