"""A PDService's status: what `kubectl get pds` shows. Pure: the same facts give the same status, to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.operator.api.status_schema import MAX_DECISIONS
from pdserve.operator.names import DECODE, GATEWAY, POOLS, PREFILL, REDIS
from pdserve.operator.status.conditions import Condition, merge_conditions
from pdserve.operator.status.health import Health
from pdserve.operator.status.pods_seen import Problem
from pdserve.operator.status.reasons import Reason

Json = dict[str, Any]


@dataclass(frozen=True)
class PoolCount:
    """Numbers of workers of one pool."""

    desired: int
    ready: int
    starting: int
    draining: int
    updated: int


@dataclass(frozen=True)
class StatusFacts:
    """Everything a status says, but its times."""

    health: Mapping[str, Health]
    """Verdicts by role; without redis when the operator does not run it."""
    pools: Mapping[str, PoolCount]
    rollout_reason: Reason
    rollout_message: str
    scaling: Condition
    signature: str
    url: str
    surge_problem: Problem | None
    """What is wrong with a new pod during a rollout."""
    new_decisions: tuple[Json, ...] = ()


def service_status(previous: Json, facts: StatusFacts, generation: int, now: str) -> Json:
    """The whole status of a service whose spec is good."""
    conditions = [
        _ready(facts),
        *(_role_condition(role, facts.health[role]) for role in (GATEWAY, *POOLS)),
        _transfer(facts),
        facts.scaling,
        _progressing(facts),
        _degraded(facts),
    ]
    status = {
        "observedGeneration": generation,
        "conditions": merge_conditions(previous.get("conditions", []), conditions, generation, now),
        "pools": {role: _pool(count) for role, count in facts.pools.items()},
        "kvSignature": facts.signature,
        "url": facts.url,
    }
    if "observed" in previous:
        status["observed"] = previous["observed"]
    decisions = [*facts.new_decisions, *previous.get("decisions", [])][:MAX_DECISIONS]
    return status | ({"decisions": decisions} if decisions else {})


def refused_status(previous: Json, reason: Reason, message: str, generation: int, now: str) -> Json:
    """The status of a spec that cannot be served: everything else is said as it last was, and keeps running."""
    runs = bool(previous.get("pools"))
    kept = " The last good state keeps running." if runs else ""
    conditions = [Condition("Degraded", True, reason, message + kept)]
    if not runs:
        conditions.append(Condition("Ready", False, reason, message))
    fresh = merge_conditions(previous.get("conditions", []), conditions, generation, now)
    names = {condition["type"] for condition in fresh}
    kept_conditions = [condition for condition in previous.get("conditions", []) if condition["type"] not in names]
    return previous | {"observedGeneration": generation, "conditions": [*kept_conditions, *fresh]}


def _ready(facts: StatusFacts) -> Condition:
    not_ready = [health for health in facts.health.values() if not health.is_ready]
    if not_ready:
        worst = min(not_ready, key=lambda health: not health.is_broken)
        return Condition("Ready", False, worst.reason, worst.message)
    if facts.rollout_reason != Reason.COMPLETE:
        return Condition("Ready", False, facts.rollout_reason, facts.rollout_message)
    return Condition("Ready", True, Reason.READY, "Gateway, prefill and decode workers are ready.")


def _role_condition(role: str, health: Health) -> Condition:
    return Condition(f"{role.title()}Ready", health.is_ready, health.reason, health.message)


def _transfer(facts: StatusFacts) -> Condition:
    failing = next((h for h in facts.health.values() if h.reason == Reason.TRANSFERS_FAILING), None)
    if failing is not None:
        return Condition("TransferHealthy", False, failing.reason, failing.message)
    if not all(facts.pools[role].ready for role in POOLS):
        return Condition("TransferHealthy", None, Reason.NO_PAIR, "No pair of prefill and decode workers is ready.")
    return Condition("TransferHealthy", True, Reason.READY, "Every ready worker reports a usable transport.")


def _progressing(facts: StatusFacts) -> Condition:
    is_moving = facts.rollout_reason in (Reason.ROLLING_OUT, Reason.STARTING)
    return Condition("Progressing", is_moving, facts.rollout_reason, facts.rollout_message)


def _degraded(facts: StatusFacts) -> Condition:
    for role in (REDIS, PREFILL, DECODE, GATEWAY):
        health = facts.health.get(role)
        if health is not None and health.is_broken:
            return Condition("Degraded", True, health.reason, health.message)
    if facts.surge_problem is not None:
        message = f"new pods: {facts.surge_problem.message.rstrip('.')}. The previous revision keeps serving."
        return Condition("Degraded", True, facts.surge_problem.reason, message)
    return Condition("Degraded", False, Reason.AS_EXPECTED, "Nothing needs attention.")


def _pool(count: PoolCount) -> Json:
    return {
        "desired": count.desired,
        "ready": count.ready,
        "starting": count.starting,
        "draining": count.draining,
        "updated": count.updated,
        "display": f"{count.ready}/{count.desired}",
    }
