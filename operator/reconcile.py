"""Brings one PDService closer to what its spec says, and says in its status how far it is.

    read → plan → apply what has changed → decide on sizes → step the rollout → status and events

Level-triggered: every call looks at what exists and does the next right thing; nothing needed is remembered.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pdserve.log import get_logger
from pdserve.operator.api.policy import Policy, read_policy
from pdserve.operator.api.spec import ServiceSpec, SpecError, read_service
from pdserve.operator.cluster.events import now_text, post_event
from pdserve.operator.cluster.kube import GoneError, Kube, RefusedError, path_of
from pdserve.operator.cluster.live import Live, PodAnswers, look
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import API_VERSION, FIELD_MANAGER, GATEWAY, POOLS, REDIS
from pdserve.operator.objects.children import Children
from pdserve.operator.objects.deployments import deployment, with_replicas
from pdserve.operator.objects.plan import Plan, plan_of, with_owner
from pdserve.operator.sizing.pools import apply_step, observation, pool_count, rollout_seen, template_digest
from pdserve.operator.sizing.rollout import RolloutStep, next_step
from pdserve.operator.sizing.scaler import Scaler, needs_owner_of_replicas
from pdserve.operator.sizing.scaling import Decision, ScalingState, decide
from pdserve.operator.status.conditions import Condition, transitions
from pdserve.operator.status.health import Health, role_health, worst_problem
from pdserve.operator.status.status import StatusFacts, refused_status, service_status

logger = get_logger(__name__)

Json = dict[str, Any]

_ROLLING_S = 1.0
"""Between looks at a service whose workers are replaced."""
_WAITING_S = 4.0
"""Between looks at a service that is not ready; its Deployments' changes bring one sooner."""
_REREAD_S = 300.0
"""Children other than Deployments are compared with the server this often."""
_EVENTFUL = ("Ready", "Degraded", "Progressing")
"""Conditions whose transitions are events."""


class ServiceReconciler:
    """One service, as long as it exists."""

    def __init__(self, kube: Kube, facts: ClusterFacts, answers: PodAnswers, owner: Owner, resync_s: float) -> None:
        self._kube, self._facts, self._answers, self._owner = kube, facts, answers, owner
        self._resync_s = resync_s
        self._children = Children(kube, owner, facts)
        self._scaler = Scaler(kube, owner, answers, honours_deletion_cost=facts.honours_deletion_cost)
        self._scaling_state = ScalingState()
        self._policy: Policy | None = None
        self._read_s: float | None = None

    async def reconcile(self, service: Json) -> float:
        """Do what can be done now; seconds until the next look.

        Raises:
            ClusterError: try again later.
        """
        try:
            spec = read_service(service)
            policy, policy_problem = await self._read_policy(spec)
            hold = (policy.hold_requests, policy.hold_timeout_s) if spec.pools["prefill"].min == 0 else None
            plan = plan_of(spec, self._owner, self._facts, hold)
            return await self._bring_about(service, spec, plan, policy, policy_problem)
        except SpecError as error:
            await self._refuse(service, "InvalidSpec", f"{error}.")
        except RefusedError as error:
            await self._refuse(service, "RefusedByApiServer", f"{error}.")
        return self._resync_s

    async def _bring_about(
        self, service: Json, spec: ServiceSpec, plan: Plan, policy: Policy, policy_problem: str | None
    ) -> float:
        await self._read_children(service)
        if plan.has_managed_redis:
            await self._children.ensure_password()
        # Pods refer to accounts and settings; nothing else depends on an order.
        await asyncio.gather(*(self._children.apply(item) for item in plan.others))
        live = await look(self._kube, self._owner)
        self._children.note_live(live.deployments.values())
        decisions = await self._size(service, spec, plan, policy, live)
        if any(decision.is_change and decision.is_applied for decision in decisions):
            live = await look(self._kube, self._owner, is_cached=False)
            self._children.note_live(live.deployments.values())
        wanted = {role: live.replicas(role) or 0 for role in POOLS}
        step = next_step(rollout_seen(spec, plan, live, wanted, time.time()))
        await self._apply_deployments(spec, plan, live, step)
        await self._clean_up(plan, live, step)
        facts = await self._facts_of(spec, plan, live, wanted, step, decisions, policy_problem)
        before = service.get("status", {})
        status = service_status(before, facts, service["metadata"]["generation"], now_text())
        await self._write(service, before, status)
        ready = next(condition for condition in status["conditions"] if condition["type"] == "Ready")
        if step.reason == "RollingOut":
            return _ROLLING_S
        return self._resync_s if ready["status"] == "True" else _WAITING_S

    async def _read_children(self, service: Json) -> None:
        """A service without a status is new: there is nothing to read."""
        now_s = time.monotonic()
        is_due = self._read_s is None or now_s - self._read_s > _REREAD_S
        if is_due and (self._read_s is not None or service.get("status")):
            await self._children.read()
        if is_due:
            self._read_s = now_s

    async def _read_policy(self, spec: ServiceSpec) -> tuple[Policy, str | None]:
        """The policy, and why it is not the one that was asked for; the last known one stays in effect."""
        if spec.policy is None:
            return read_policy({}), None
        path = path_of(API_VERSION, "ScalingPolicy", self._owner.namespace, spec.policy)
        try:
            self._policy = read_policy((await self._kube.get(path)).get("spec") or {})
        except (GoneError, SpecError) as error:
            kind = "does not exist" if isinstance(error, GoneError) else f"is refused ({error})"
            known = "the last known one" if self._policy else "the default policy"
            return self._policy or read_policy({}), f"ScalingPolicy {spec.policy} {kind}: {known} is in effect."
        return self._policy, None

    # --- sizes

    async def _size(self, service: Json, spec: ServiceSpec, plan: Plan, policy: Policy, live: Live) -> list[Decision]:
        decisions, self._scaling_state = decide(observation(live), spec, policy, self._scaling_state, time.monotonic())
        for decision in decisions:
            if decision.is_change and decision.is_applied:
                await self._resize(service, plan, decision, live)
        return decisions

    async def _resize(self, service: Json, plan: Plan, decision: Decision, live: Live) -> None:
        if decision.current is None:
            await self._create_pool(plan, decision)
            return
        await self._scaler.carry_out(decision, live)
        message = (
            f"{decision.pool}: {decision.current} → {decision.wanted} workers ({decision.rule}; {decision.inputs})"
        )
        await post_event(self._kube, service, "Scaled", message, is_warning=False)

    async def _create_pool(self, plan: Plan, decision: Decision) -> None:
        """The scaler alone owns the number. Left out at first it is 1: a pool of none is made with its number."""
        made = plan.pools[decision.pool]
        if decision.wanted == 0:
            made = with_replicas(made, 0)
        await self._children.apply(with_owner(made, self._owner))
        if decision.wanted != 1:
            await self._scaler.set_replicas(decision.pool, decision.wanted)

    # --- rollout

    async def _apply_deployments(self, spec: ServiceSpec, plan: Plan, live: Live, step: RolloutStep) -> None:
        gateway = plan.gateway
        is_rolling = self._has_old_gateways(plan, live)
        if step.holds_gateway and is_rolling:
            held = deployment(spec.name, GATEWAY, gateway["spec"]["template"], hold=True)
            gateway = with_replicas(held, spec.gateway.replicas)
        await self._children.apply(with_owner(gateway, self._owner))
        for role in POOLS:
            if role in live.deployments and step.pools[role].is_applied:
                await self._keep_replicas(live.deployments[role], role)
                made = apply_step(spec.name, role, plan.pools[role], step.pools[role])
                await self._children.apply(with_owner(made, self._owner))

    def _has_old_gateways(self, plan: Plan, live: Live) -> bool:
        if GATEWAY not in live.deployments:
            return False
        digest = template_digest(plan.gateway)
        return live.template(GATEWAY) != digest or any(pod.template != digest for pod in live.of(GATEWAY))

    async def _keep_replicas(self, live: Json, role: str) -> None:
        if needs_owner_of_replicas(live):
            await self._scaler.set_replicas(role, live["spec"]["replicas"])

    async def _clean_up(self, plan: Plan, live: Live, step: RolloutStep) -> None:
        """ConfigMaps of older templates are needed until their last pod has gone."""
        if step.reason == "Complete" and not self._has_old_gateways(plan, live):
            await self._children.delete_all_but([*plan.others, *self._named(plan)])

    def _named(self, plan: Plan) -> list[Json]:
        return [with_owner(made, self._owner) for made in (plan.gateway, *plan.pools.values())]

    # --- status

    async def _facts_of(
        self,
        spec: ServiceSpec,
        plan: Plan,
        live: Live,
        wanted: dict[str, int],
        step: RolloutStep,
        decisions: list[Decision],
        policy_problem: str | None,
    ) -> StatusFacts:
        answers = await self._answers.why_not_ready(live.pods)
        health = {
            role: role_health(role, number, live.deployments.get(role), live.of(role), answers, time.time())
            for role, number in self._wanted_by_role(spec, plan, wanted).items()
        }
        if REDIS in health and health[REDIS].reason == "MissingSecret":
            self._children.forget_password()
        gateway_waits = health[GATEWAY].reason == "Starting" and not all(health[role].is_ready for role in POOLS)
        if gateway_waits:
            health[GATEWAY] = Health(False, "Starting", "Waiting for a pair of prefill and decode workers.")
        is_rolled = step.reason == "Complete" and not self._has_old_gateways(plan, live)
        reason, message = step.reason, step.message
        if step.reason == "Complete" and not is_rolled:
            reason, message = "RollingOut", "Gateways of the newest template replace older ones."
        surge = [pod for role in POOLS for pod in live.alive(role) if reason != "Complete"]
        return StatusFacts(
            health=health,
            pools={role: pool_count(live, role, plan.pools[role], wanted[role]) for role in POOLS},
            rollout_reason=reason,
            rollout_message=message,
            scaling=_scaling_condition(spec, decisions, policy_problem),
            signature=plan.signature,
            url=f"http://{spec.name}.{self._owner.namespace}.svc",
            surge_problem=worst_problem(surge),
            new_decisions=tuple(
                _decision_entry(decision)
                for decision in decisions
                if decision.is_change and decision.is_applied and decision.current is not None
            ),
        )

    def _wanted_by_role(self, spec: ServiceSpec, plan: Plan, wanted: dict[str, int]) -> dict[str, int]:
        roles = {GATEWAY: spec.gateway.replicas, **wanted}
        return roles | ({REDIS: 1} if plan.has_managed_redis else {})

    async def _refuse(self, service: Json, reason: str, message: str) -> None:
        before = service.get("status", {})
        status = refused_status(before, reason, message, service["metadata"]["generation"], now_text())
        await self._write(service, before, status)

    async def _write(self, service: Json, before: Json, status: Json) -> None:
        """Nothing is written, and nothing said, when nothing has changed."""
        if status == before:
            return
        metadata = {"name": self._owner.name, "namespace": self._owner.namespace}
        item = {"apiVersion": API_VERSION, "kind": "PDService", "metadata": metadata, "status": status}
        await self._kube.apply(item, FIELD_MANAGER, subresource="status")
        for condition in transitions(before.get("conditions", []), status["conditions"]):
            if _is_eventful(condition, is_new=not before):
                message = condition["message"]
                await post_event(self._kube, service, condition["reason"], message, is_warning=_is_bad(condition))


def _is_eventful(condition: Json, *, is_new: bool) -> bool:
    """That a new service starts is no news, and what is wrong with it is told once."""
    return _is_bad(condition) if is_new else condition["type"] in _EVENTFUL


def _is_bad(condition: Json) -> bool:
    if condition["type"] == "Degraded":
        return bool(condition["status"] == "True")
    return bool(condition["reason"] == "NoRoomToSurge")


def _scaling_condition(spec: ServiceSpec, decisions: list[Decision], policy_problem: str | None) -> Condition:
    if policy_problem is not None:
        return Condition("ScalingActive", spec.scaling == "Auto", "PolicyNotUsable", policy_problem)
    if spec.scaling == "Auto":
        return Condition("ScalingActive", True, "Auto", "The operator decides on the number of workers.")
    if spec.scaling == "Off":
        return Condition("ScalingActive", False, "Off", "The Deployments' replicas belong to somebody else.")
    advice = ", ".join(f"{decision.pool} {decision.wanted}" for decision in decisions if decision.is_change)
    return Condition("ScalingActive", False, "Advise", f"Would set: {advice}." if advice else "Would change nothing.")


def _decision_entry(decision: Decision) -> Json:
    entry: Json = {
        "time": now_text(),
        "pool": decision.pool,
        "from": decision.current,
        "to": decision.wanted,
        "inputs": decision.inputs,
        "rule": decision.rule,
    }
    return entry | ({"clampedBy": decision.clamped_by} if decision.clamped_by else {})
