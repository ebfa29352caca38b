"""The two pools as they are rolled and scaled: from a look at the cluster to a rollout's and a law's input. Pure."""

from __future__ import annotations

from typing import Any

from pdserve.operator.api.spec import ServiceSpec
from pdserve.operator.names import GATEWAY, POOLS, TEMPLATE_LABEL
from pdserve.operator.objects.deployments import deployment, without_surge
from pdserve.operator.objects.plan import Plan
from pdserve.operator.sizing.rollout import PoolSeen, PoolStep, RolloutSeen
from pdserve.operator.sizing.scaling import Observation, PoolLoad
from pdserve.operator.status.live import Live
from pdserve.operator.status.pods_seen import PodSeen
from pdserve.operator.status.status import PoolCount

Json = dict[str, Any]


def template_digest(made: Json) -> str:
    """Digest of the template of a Deployment that was built here."""
    return str(made["spec"]["template"]["metadata"]["labels"][TEMPLATE_LABEL])


def observation(live: Live) -> Observation:
    """Input of the scaling law."""
    return Observation({role: _load(live, role) for role in POOLS})


def _load(live: Live, role: str) -> PoolLoad:
    alive = live.alive(role)
    ready = sum(pod.is_ready for pod in alive)
    return PoolLoad(live.replicas(role), ready, len(alive) - ready, len(live.of(role)) - len(alive))


def has_old_gateways(plan: Plan, live: Live) -> bool:
    """Whether the gateway's Deployment, or a pod of it, is of another template than the plan's."""
    if GATEWAY not in live.deployments:
        return False
    digest = template_digest(plan.gateway)
    return live.template(GATEWAY) != digest or any(pod.template != digest for pod in live.of(GATEWAY))


def rollout_seen(spec: ServiceSpec, plan: Plan, live: Live, now_s: float) -> RolloutSeen:
    """Input of a rollout's step; `now_s`: wall clock."""
    digests = {role: template_digest(made) for role, made in plan.pools.items()}
    gateway = template_digest(plan.gateway)
    workers = [pod for role in POOLS for pod in live.alive(role)]
    return RolloutSeen(
        pools={role: _pool_seen(live, role, digests[role], now_s) for role in POOLS},
        is_compatible=all(pod.signature == plan.signature for pod in workers),
        num_old_gateways=sum(pod.template != gateway for pod in live.of(GATEWAY)),
        pod_budget=_budget(spec),
        max_skew=spec.max_skew,
        allows_downtime=spec.allows_downtime,
    )


def _budget(spec: ServiceSpec) -> int | None:
    """Workers of both pools together; accelerators count where both pools have one."""
    limits = [spec.budget_pods]
    if all(pool.accelerator for pool in spec.pools.values()):
        limits.append(spec.budget_accelerators)
    return min((limit for limit in limits if limit is not None), default=None)


def _pool_seen(live: Live, role: str, digest: str, now_s: float) -> PoolSeen:
    new = [pod for pod in live.alive(role) if pod.template == digest]
    old = [pod for pod in live.alive(role) if pod.template != digest]
    exists = role in live.deployments
    return PoolSeen(
        wanted=live.replicas(role) or 0,
        exists=exists,
        is_current=exists and live.template(role) == digest,
        new_total=len(new),
        new_ready=sum(pod.is_ready for pod in new),
        new_unschedulable_s=max((_without_node_s(pod, now_s) for pod in new), default=0.0),
        old_total=len(old),
        old_ready=sum(pod.is_ready for pod in old),
        old_broken=sum(not pod.is_ready and not pod.has_started for pod in old),
    )


def _without_node_s(pod: PodSeen, now_s: float) -> float:
    return max(0.001, now_s - pod.unschedulable_since_s) if pod.unschedulable_since_s is not None else 0.0


def apply_step(service: str, role: str, made: Json, step: PoolStep) -> Json:
    """A pool's Deployment for one step of a rollout."""
    template = made["spec"]["template"]
    held = deployment(service, role, template, hold=step.hold, max_replaced=step.max_replaced)
    return held if step.has_surge else without_surge(held)


def pool_count(live: Live, role: str, made: Json, wanted: int) -> PoolCount:
    """How many workers a pool has, as the status shows it."""
    alive = live.alive(role)
    ready = [pod for pod in alive if pod.is_ready]
    updated = sum(pod.template == template_digest(made) for pod in ready)
    return PoolCount(wanted, len(ready), len(alive) - len(ready), len(live.of(role)) - len(alive), updated)
