"""One service, looked at again and again: a small API server, a model of the Deployment controller, a turned clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from api_server import ApiServer, merged, running
from deployment_simulator import Deployment, Pod

from pdserve.operator.clock import Clock
from pdserve.operator.cluster.kube import Kube, path_of
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import API_VERSION, DECODE, GATEWAY, PREFILL, REDIS, ROLE_LABEL, TEMPLATE_LABEL
from pdserve.operator.reconcile import ServiceReconciler
from pdserve.operator.sizing.rollout import PoolStep
from pdserve.operator.status.pods_seen import PodSeen
from pdserve.readiness import Readiness, ReadyLoad, ReadyReason

Json = dict[str, Any]

SERVICE = path_of(API_VERSION, "PDService", "shop", "chat")
POLICY = path_of(API_VERSION, "ScalingPolicy", "shop", "nightly")
POD = path_of("v1", "Pod", "shop")
ROLES = (GATEWAY, PREFILL, DECODE, REDIS)


class Answers:
    """What pods say of themselves, in the place of HTTP."""

    def __init__(self) -> None:
        self.said: dict[str, Readiness] = {}

    async def why_not_ready(self, pods: list[PodSeen]) -> dict[str, Readiness]:
        return {pod.name: self.said[pod.name] for pod in pods if pod.name in self.said and not pod.is_ready}

    async def readiness(self, pods: list[PodSeen]) -> dict[str, Readiness]:
        return {pod.name: self.said[pod.name] for pod in pods if pod.name in self.said}


@dataclass
class World:
    """A cluster with one service, and the operator that looks after it."""

    server: ApiServer
    kube: Kube
    now_s: float = 1_000_000.0
    answers: Answers = field(default_factory=Answers)
    controllers: dict[str, Deployment] = field(default_factory=dict)
    names: dict[int, tuple[str, Pod]] = field(default_factory=dict)
    """Identity of a pod → its name; the pod is kept, so that no other one gets its identity."""
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    starts: bool = True
    reconciler: ServiceReconciler = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another operator process, which remembers nothing."""
        clock = Clock(lambda: self.now_s, lambda: self.now_s)
        uid = self.server.objects.get(SERVICE, {"metadata": {"uid": "u"}})["metadata"]["uid"]
        answers: Any = self.answers
        self.reconciler = ServiceReconciler(
            self.kube, Owner("chat", "shop", uid), ClusterFacts(), answers, resync_s=30.0, clock=clock
        )

    @property
    def status(self) -> Json:
        return dict(self.server.objects[SERVICE].get("status", {}))

    @property
    def events(self) -> list[str]:
        return [item["reason"] for item in self.server.named("events").values()]

    def condition(self, kind: str) -> Json:
        return next(item for item in self.status["conditions"] if item["type"] == kind)

    def edit(self, **spec: Any) -> None:
        """What a person does with kubectl."""
        before = self.server.objects.get(SERVICE, {"apiVersion": API_VERSION, "kind": "PDService", "spec": {}})
        metadata = {"metadata": {"name": "chat", "namespace": "shop"}}
        self.server.put_object(SERVICE, merged(before, metadata | {"spec": spec}))
        if not before["spec"]:
            self.restart()

    async def look(self) -> float:
        """One look of the operator; a second passes."""
        self.now_s += 1.0
        return await self.reconciler.reconcile(self.server.objects[SERVICE])

    def play_controllers(self) -> None:
        """One pass of the Deployment controller, the scheduler and the kubelets."""
        for name, item in self.server.named("deployments").items():
            self._play(name, item)

    def _play(self, name: str, item: Json) -> None:
        spec, labels = item["spec"], item["spec"]["template"]["metadata"]["labels"]
        template = labels.get(TEMPLATE_LABEL, "")
        deployment = self.controllers.get(name)
        if deployment is None:
            deployment = self.controllers[name] = Deployment(0, template)
        rolling = spec["strategy"].get("rollingUpdate", {"maxSurge": 0, "maxUnavailable": 1})
        deployment.replicas = spec["replicas"]
        deployment.apply(
            template,
            PoolStep(
                hold=spec.get("minReadySeconds", 0) > 0,
                has_surge=rolling["maxSurge"] > 0,
                max_replaced=rolling["maxUnavailable"],
            ),
        )
        deployment.controller()
        if self.starts:
            deployment.start_some(self.chance)
        wanted = {self._name(name, pod): self._object(name, pod, item) for pod in deployment.pods}
        gone = {pod for pod in self.server.named("pods") if pod.startswith(f"{name}-") and pod not in wanted}
        for pod in gone:
            self.server.delete_object(f"{POD}/{pod}")
        for pod, made in wanted.items():
            self.server.put_object(f"{POD}/{pod}", made)

    def _name(self, deployment: str, pod: Pod) -> str:
        return self.names.setdefault(id(pod), (f"{deployment}-{len(self.names):05d}", pod))[0]

    def _object(self, deployment: str, pod: Pod, item: Json) -> Json:
        labels = item["spec"]["template"]["metadata"]["labels"] | {TEMPLATE_LABEL: pod.template}
        since = "2026-01-31T12:00:00Z"
        return {
            "metadata": {"name": self._name(deployment, pod), "labels": labels, "creationTimestamp": since,
                         "ownerReferences": [{"uid": item["metadata"]["uid"]}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1",
                       "conditions": [{"type": "Ready", "status": str(pod.is_ready), "lastTransitionTime": since}],
                       "containerStatuses": [{"name": "x", "started": pod.has_started, "state": {"running": {}}}]},
        }  # fmt: skip

    def pods(self, role: str) -> dict[str, str]:
        """Name → digest of its template."""
        pods = self.server.named("pods").items()
        labels = {name: item["metadata"]["labels"] for name, item in pods}
        return {name: found[TEMPLATE_LABEL] for name, found in labels.items() if found[ROLE_LABEL] == role}

    def num_ready(self, role: str) -> int:
        return sum(self._is_ready(name) for name in self.pods(role))

    def ready_templates(self, role: str) -> set[str]:
        return {template for name, template in self.pods(role).items() if self._is_ready(name)}

    def _is_ready(self, pod: str) -> bool:
        return bool(self.server.objects[f"{POD}/{pod}"]["status"]["conditions"][0]["status"] == "True")

    async def settle(self, max_looks: int = 60) -> int:
        """Looks and controllers in turns until the service is ready; the number of looks."""
        for number in range(1, max_looks + 1):
            await self.look()
            self.play_controllers()
            if number > 1 and self.condition("Ready")["status"] == "True":
                return number
        pytest.fail(f"not ready after {max_looks} looks: {self.status}")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running() as (server, kube):
        made = World(server, kube)
        made.edit(model={"source": "demo"}, decode={"min": 2})
        yield made


async def test_a_new_service_gets_its_children_and_becomes_ready(world: World) -> None:
    again_s = await world.look()
    assert again_s < 30.0, "a service that is not ready is looked at again soon"
    assert set(world.server.named("deployments")) == {f"chat-{role}" for role in ROLES}
    assert {"chat", "chat-redis"} == set(world.server.named("services"))
    assert len(world.server.named("configmaps")) == 3
    assert world.server.named("deployments")["chat-decode"]["spec"]["replicas"] == 2
    assert world.condition("Ready")["reason"] == "Starting"
    owner = world.server.objects[SERVICE]["metadata"]["uid"]
    for item in world.server.named("deployments").values():
        assert item["metadata"]["ownerReferences"][0]["uid"] == owner
    await world.settle()
    assert world.condition("ScalingActive")["reason"] == "Auto"
    assert world.status["pools"]["decode"]["display"] == "2/2"
    assert await world.look() == 30.0
    assert world.events.count("Ready") == 1


async def test_nothing_is_sent_while_nothing_changes(world: World) -> None:
    await world.settle()
    await world.look()
    world.server.requests.clear()
    for _ in range(20):
        await world.look()
    assert world.server.writes == []


async def test_another_operator_goes_on_without_sending_anything(world: World) -> None:
    await world.settle()
    await world.look()
    world.restart()
    world.server.requests.clear()
    await world.look()
    assert [write for write in world.server.writes if "/secrets" not in write[1]] == []


async def test_what_is_deleted_by_hand_comes_back(world: World) -> None:
    await world.settle()
    world.server.delete_object(path_of("apps/v1", "Deployment", "shop", "chat-decode"))
    service = path_of("v1", "Service", "shop", "chat")
    world.server.delete_object(service)
    await world.look()
    assert "chat-decode" in world.server.named("deployments")
    world.now_s += 301.0  # other children than Deployments are compared every five minutes
    await world.look()
    assert service in world.server.objects


@pytest.mark.parametrize("seed", range(4))
async def test_another_template_rolls_both_pools_in_pairs_and_old_settings_go_last(world: World, seed: int) -> None:
    world.chance.seed(seed)
    await world.settle()
    before = {role: set(world.pods(role).values()) for role in (PREFILL, DECODE)}
    world.edit(model={"source": "tiny"})
    seen_reasons = set()
    for _ in range(80):
        again_s = await world.look()
        world.play_controllers()
        seen_reasons.add(world.condition("Progressing")["reason"])
        assert world.num_ready(PREFILL) >= 1
        assert world.num_ready(DECODE) >= 2
        templates = {role: world.ready_templates(role) for role in (PREFILL, DECODE)}
        has_old = all(before[role] & found for role, found in templates.items())
        has_new = all(found - before[role] for role, found in templates.items())
        assert has_old or has_new, "ready prefill and decode workers of one template remain"
        if world.condition("Ready")["status"] == "True":
            break
        assert again_s <= 4.0
    assert world.condition("Progressing")["reason"] == "Complete"
    assert "RollingOut" in seen_reasons
    for role in (PREFILL, DECODE):
        assert not before[role] & set(world.pods(role).values())
    await world.look()
    assert len(world.server.named("configmaps")) == 3, "settings of the older template are gone"
    assert world.server.named("deployments")["chat-decode"]["spec"]["minReadySeconds"] == 0


async def test_a_killed_operator_in_the_middle_of_a_rollout_is_no_loss(world: World) -> None:
    await world.settle()
    world.edit(model={"source": "tiny"})
    for _ in range(80):
        world.restart()
        await world.look()
        world.play_controllers()
        assert world.num_ready(DECODE) >= 2
        if world.condition("Ready")["status"] == "True":
            break
    assert world.condition("Ready")["status"] == "True"


async def test_workers_that_never_start_leave_the_old_ones_alone(world: World) -> None:
    await world.settle()
    before = {role: world.pods(role) for role in (PREFILL, DECODE)}
    world.starts = False
    world.edit(model={"source": "tiny"})
    for _ in range(30):
        await world.look()
        world.play_controllers()
    for role in (PREFILL, DECODE):
        assert before[role].items() <= world.pods(role).items()
    assert world.condition("Ready")["reason"] == "RollingOut"


async def test_a_refused_spec_keeps_the_last_good_state_and_says_what_is_wrong(world: World) -> None:
    await world.settle()
    good = {name: item["spec"] for name, item in world.server.named("deployments").items()}
    world.edit(prefill={"min": 3, "max": 2})
    world.server.requests.clear()
    for _ in range(3):
        assert await world.look() == 30.0
    assert {name: item["spec"] for name, item in world.server.named("deployments").items()} == good
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "min must not be greater than max" in degraded["message"]
    assert world.condition("Ready")["status"] == "True"
    assert len(world.server.writes) == 2, "one status and one event, however often it is looked at"
    world.edit(prefill={"min": 1, "max": 1})
    await world.settle()
    assert world.condition("Degraded")["status"] == "False"


async def test_a_refusal_of_the_server_is_told_in_its_words(world: World) -> None:
    world.server.answers = [(201, {}), (422, {})]
    assert await world.look() == 30.0
    assert world.condition("Degraded")["reason"] == "RefusedByApiServer"
    assert "said 422" in world.condition("Degraded")["message"]


async def test_children_go_with_their_service(world: World) -> None:
    await world.settle()
    world.server.delete_object(SERVICE)
    left = {path for path in world.server.objects if "/events/" not in path}
    assert left == set()


async def test_a_number_changed_by_hand_is_corrected_and_told(world: World) -> None:
    await world.settle()
    path = path_of("apps/v1", "Deployment", "shop", "chat-decode")
    world.server.put_object(path, merged(world.server.objects[path], {"spec": {"replicas": 5}}))
    await world.look()
    assert world.server.objects[path]["spec"]["replicas"] == 2
    assert world.events.count("Scaled") == 1
    assert [(d["pool"], d["from"], d["to"]) for d in world.status["decisions"]] == [("decode", 5, 2)]


async def test_the_least_loaded_worker_goes_when_a_pool_shrinks(world: World) -> None:
    await world.settle()
    busy, idle = world.pods(DECODE)
    for name, blocks in ((busy, 90), (idle, 2)):
        load = ReadyLoad(num_used_blocks=blocks)
        world.answers.said[name] = Readiness(ready=True, reason=ReadyReason.READY, message="…", load=load)
    world.edit(decode={"min": 1})
    await world.look()
    costs = {
        name: item["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost")
        for name, item in world.server.named("pods").items()
    }
    assert (costs[idle], costs[busy]) == ("-1000", None)


async def test_what_a_pod_says_of_itself_is_in_the_conditions(world: World) -> None:
    world.starts = False
    await world.look()
    world.play_controllers()
    (prefill,) = world.pods(PREFILL)
    world.answers.said[prefill] = Readiness(
        ready=False, reason=ReadyReason.BUS_UNREACHABLE, message="The bus at redis://x does not answer."
    )
    await world.look()
    assert world.condition("PrefillReady")["message"] == "prefill: The bus at redis://x does not answer."
    assert world.condition("Degraded")["reason"] == world.condition("Ready")["reason"] == "RedisUnavailable"
    assert "RedisUnavailable" in world.events


async def test_a_policy_that_sets_what_is_not_read_is_told_and_one_that_is_missing_too(world: World) -> None:
    world.edit(scaling={"policyRef": "nightly"})
    await world.settle()
    assert world.condition("ScalingActive")["reason"] == "PolicyNotUsable"
    world.server.put_object(POLICY, {"metadata": {"name": "nightly"}, "spec": {"interval": "1s", "window": "2m"}})
    await world.look()
    scaling = world.condition("ScalingActive")
    assert (scaling["status"], scaling["reason"]) == ("False", "NotSupportedYet")
    assert scaling["message"].startswith("window of ScalingPolicy nightly is not supported by this version:")
    world.server.put_object(POLICY, {"metadata": {"name": "nightly"}, "spec": {"interval": "1s", "window": "60s"}})
    await world.look()
    assert world.condition("ScalingActive")["reason"] == "Auto"
    assert world.condition("Ready")["status"] == "True"


async def test_a_password_that_was_deleted_is_drawn_again(world: World) -> None:
    await world.settle()
    secret = path_of("v1", "Secret", "shop", "chat-redis")
    world.server.delete_object(secret)
    (name,) = world.pods(REDIS)
    pod = world.server.objects[f"{POD}/{name}"]
    pod["status"]["conditions"][0]["status"] = "False"
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "chat-redis" not found'}
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": waiting}
    await world.look()
    assert world.condition("Degraded")["reason"] == "MissingSecret"
    await world.look()
    assert secret in world.server.objects
