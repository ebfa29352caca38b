"""The facts of a status, out of what one reconcile saw and decided. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.operator.api.spec import ServiceSpec
from pdserve.operator.facts import Owner
from pdserve.operator.names import GATEWAY, POOLS, REDIS
from pdserve.operator.objects.plan import Plan
from pdserve.operator.sizing.pools import has_old_gateways, pool_count
from pdserve.operator.sizing.rollout import RolloutStep
from pdserve.operator.sizing.scaling import Decision
from pdserve.operator.status.conditions import Condition
from pdserve.operator.status.health import Health, role_health, worst_problem
from pdserve.operator.status.live import Live
from pdserve.operator.status.reasons import Reason
from pdserve.operator.status.status import StatusFacts
from pdserve.readiness import Readiness

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What one reconcile saw, and what it did about it."""

    spec: ServiceSpec
    plan: Plan
    live: Live
    decisions: Sequence[Decision]
    step: RolloutStep
    scaling: Condition

    @property
    def wanted(self) -> dict[str, int]:
        """Pods that shall be ready, by role."""
        pools = {role: self.live.replicas(role) or 0 for role in POOLS}
        return {GATEWAY: self.spec.gateway.replicas} | pools | ({REDIS: 1} if self.plan.has_managed_redis else {})

    @property
    def is_rolled(self) -> bool:
        """Whether every pod is of the newest template."""
        return self.step.reason == Reason.COMPLETE and not has_old_gateways(self.plan, self.live)


def status_facts(
    outcome: Outcome, owner: Owner, answers: Mapping[str, Readiness], now_s: float, now: str
) -> StatusFacts:
    """Everything that the status says.

    Args:
        outcome: of this reconcile.
        owner: the PDService.
        answers: pod name → what its /ready says, for pods that run without being ready.
        now_s: wall clock.
        now: the same as the API writes it.
    """
    reason, message = outcome.step.reason, outcome.step.message
    if reason == Reason.COMPLETE and not outcome.is_rolled:
        reason, message = Reason.ROLLING_OUT, "Gateways of the newest template replace older ones."
    surge = [pod for role in POOLS for pod in outcome.live.alive(role) if reason != Reason.COMPLETE]
    plan, live = outcome.plan, outcome.live
    return StatusFacts(
        health=_health(outcome, answers, now_s),
        pools={role: pool_count(live, role, plan.pools[role], outcome.wanted[role]) for role in POOLS},
        rollout_reason=reason,
        rollout_message=message,
        scaling=outcome.scaling,
        signature=plan.signature,
        url=f"http://{owner.name}.{owner.namespace}.svc",
        surge_problem=worst_problem(surge),
        new_decisions=tuple(_entry(decision, now) for decision in outcome.decisions if decision.is_resize),
    )


def _health(outcome: Outcome, answers: Mapping[str, Readiness], now_s: float) -> dict[str, Health]:
    live = outcome.live
    return {
        role: role_health(role, wanted, live.deployments.get(role), live.of(role), answers, now_s)
        for role, wanted in outcome.wanted.items()
    }


def _entry(decision: Decision, now: str) -> Json:
    entry: Json = {
        "time": now,
        "pool": decision.pool,
        "from": decision.current,
        "to": decision.wanted,
        "inputs": decision.inputs,
        "rule": decision.rule,
    }
    return entry | ({"clampedBy": decision.clamped_by} if decision.clamped_by else {})
