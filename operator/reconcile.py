"""Brings one PDService closer to what its spec says, and says in its status how far it is.

    read → plan → apply what has changed → decide on sizes → step the rollout → status and events

Level-triggered: every call looks at what exists and does the next right thing; nothing needed is remembered.
Plans, steps and the status are pure (objects, sizing, status); only here and in `cluster` is anything sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.operator.api.spec import ServiceSpec, SpecError, read_service
from pdserve.operator.clock import Clock
from pdserve.operator.cluster.children import Children
from pdserve.operator.cluster.events import Events
from pdserve.operator.cluster.kube import Kube, RefusedError
from pdserve.operator.cluster.look import look
from pdserve.operator.cluster.pod_answers import PodAnswers
from pdserve.operator.cluster.policies import Policies, PolicyInEffect
from pdserve.operator.cluster.scaler import Scaler, needs_owner_of_replicas
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import API_VERSION, FIELD_MANAGER, GATEWAY, POOLS, REDIS
from pdserve.operator.objects.deployments import deployment, with_replicas
from pdserve.operator.objects.plan import Plan, plan_of, with_owner
from pdserve.operator.report import Outcome, status_facts
from pdserve.operator.sizing.pools import apply_step, has_old_gateways, observation, rollout_seen
from pdserve.operator.sizing.rollout import RolloutStep, next_step
from pdserve.operator.sizing.scaling import Decision, ScalingState, decide
from pdserve.operator.sizing.scaling_condition import scaling_condition
from pdserve.operator.status.conditions import transitions
from pdserve.operator.status.live import Live
from pdserve.operator.status.reasons import Reason
from pdserve.operator.status.status import StatusFacts, refused_status, service_status

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

    def __init__(
        self, kube: Kube, owner: Owner, facts: ClusterFacts, answers: PodAnswers, resync_s: float, clock: Clock
    ) -> None:
        self._kube, self._owner, self._facts, self._answers = kube, owner, facts, answers
        self._resync_s, self._clock = resync_s, clock
        self._children = Children(kube, owner, facts)
        self._scaler = Scaler(kube, owner, answers, honours_deletion_cost=facts.honours_deletion_cost)
        self._policies = Policies(kube, owner.namespace)
        self._events = Events(kube, clock)
        self._scaling_state = ScalingState()
        self._read_s: float | None = None

    async def reconcile(self, service: Json) -> float:
        """Do what can be done now; seconds until the next look.

        Raises:
            ClusterError: try again later.
        """
        try:
            spec = read_service(service)
            policy = await self._policies.read(spec.policy)
            plan = plan_of(spec, self._owner, self._facts, policy.policy)
            return await self._bring_about(service, spec, plan, policy)
        except SpecError as error:
            await self._refuse(service, Reason.INVALID_SPEC, f"{error}.")
        except RefusedError as error:
            await self._refuse(service, Reason.REFUSED_BY_API_SERVER, f"{error}.")
        return self._resync_s

    async def _bring_about(self, service: Json, spec: ServiceSpec, plan: Plan, policy: PolicyInEffect) -> float:
        await self._read_children(service)
        if plan.has_managed_redis:
            await self._children.ensure_password()
        # Pods refer to accounts and settings; nothing else depends on an order.
        await asyncio.gather(*(self._children.apply(item) for item in plan.others))
        live = await self._look()
        decisions = await self._size(service, spec, plan, policy, live)
        if any(decision.is_change and decision.is_applied for decision in decisions):
            live = await self._look(is_cached=False)
        step = next_step(rollout_seen(spec, plan, live, self._clock.wall_s()))
        await self._apply_deployments(spec, plan, live, step)
        scaling = scaling_condition(spec, policy.policy, policy.problem, decisions)
        outcome = Outcome(spec, plan, live, decisions, step, scaling)
        await self._clean_up(outcome)
        is_ready = await self._report(service, outcome)
        if step.reason == Reason.ROLLING_OUT:
            return _ROLLING_S
        return self._resync_s if is_ready else _WAITING_S

    async def _look(self, *, is_cached: bool = True) -> Live:
        live = await look(self._kube, self._owner, is_cached=is_cached)
        self._children.note_live(live.deployments.values())
        return live

    async def _read_children(self, service: Json) -> None:
        """A service without a status is new: there is nothing to read."""
        now_s = self._clock.steady_s()
        is_due = self._read_s is None or now_s - self._read_s > _REREAD_S
        if is_due and (self._read_s is not None or service.get("status")):
            await self._children.read()
        if is_due:
            self._read_s = now_s

    # --- sizes

    async def _size(
        self, service: Json, spec: ServiceSpec, plan: Plan, policy: PolicyInEffect, live: Live
    ) -> list[Decision]:
        decisions, self._scaling_state = decide(
            observation(live), spec, policy.policy, self._scaling_state, self._clock.steady_s()
        )
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
        await self._events.post(service, Reason.SCALED, message, is_warning=False)

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
        if step.holds_gateway and has_old_gateways(plan, live):
            held = deployment(spec.name, GATEWAY, gateway["spec"]["template"], hold=True)
            gateway = with_replicas(held, spec.gateway.replicas)
        await self._children.apply(with_owner(gateway, self._owner))
        for role in POOLS:
            if role in live.deployments and step.pools[role].is_applied:
                await self._keep_replicas(live.deployments[role], role)
                made = apply_step(spec.name, role, plan.pools[role], step.pools[role])
                await self._children.apply(with_owner(made, self._owner))

    async def _keep_replicas(self, live: Json, role: str) -> None:
        if needs_owner_of_replicas(live):
            await self._scaler.set_replicas(role, live["spec"]["replicas"])

    async def _clean_up(self, outcome: Outcome) -> None:
        """ConfigMaps of older templates are needed until their last pod has gone."""
        if outcome.is_rolled:
            plan = outcome.plan
            named = [with_owner(made, self._owner) for made in (plan.gateway, *plan.pools.values())]
            await self._children.delete_all_but([*plan.others, *named])

    # --- status

    async def _report(self, service: Json, outcome: Outcome) -> bool:
        """Write the status; whether the service is ready."""
        answers = await self._answers.why_not_ready(outcome.live.pods)
        now = self._clock.now_text()
        facts = status_facts(outcome, self._owner, answers, self._clock.wall_s(), now)
        self._note_redis(facts)
        before = service.get("status", {})
        status = service_status(before, facts, service["metadata"]["generation"], now)
        await self._write(service, before, status)
        return any(item["type"] == "Ready" and item["status"] == "True" for item in status["conditions"])

    def _note_redis(self, facts: StatusFacts) -> None:
        if REDIS in facts.health and facts.health[REDIS].reason == Reason.MISSING_SECRET:
            self._children.forget_password()

    async def _refuse(self, service: Json, reason: Reason, message: str) -> None:
        before = service.get("status", {})
        status = refused_status(before, reason, message, service["metadata"]["generation"], self._clock.now_text())
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
                reason, message = Reason(condition["reason"]), condition["message"]
                await self._events.post(service, reason, message, is_warning=_is_bad(condition))


def _is_eventful(condition: Json, *, is_new: bool) -> bool:
    """That a new service starts is no news, and what is wrong with it is told once."""
    return _is_bad(condition) if is_new else condition["type"] in _EVENTFUL


def _is_bad(condition: Json) -> bool:
    if condition["type"] == "Degraded":
        return bool(condition["status"] == "True")
    return bool(condition["reason"] == Reason.NO_ROOM_TO_SURGE)
