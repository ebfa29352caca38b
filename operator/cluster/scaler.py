"""Carries out decisions about the number of workers: by server-side apply, under a field manager of its own."""

from __future__ import annotations

from typing import Any

from pdserve.operator.cluster.kube import Kube, path_of
from pdserve.operator.cluster.pod_answers import PodAnswers
from pdserve.operator.facts import Owner
from pdserve.operator.names import DELETION_COST_ANNOTATION, FIELD_MANAGER, SCALING_MANAGER, child
from pdserve.operator.sizing.scaling import Decision
from pdserve.operator.sizing.victims import FIRST_COST, victims
from pdserve.operator.status.live import Live

Json = dict[str, Any]


class Scaler:
    """Sets the sizes of one service's pools."""

    def __init__(self, kube: Kube, owner: Owner, answers: PodAnswers, *, honours_deletion_cost: bool) -> None:
        self._kube, self._owner, self._answers = kube, owner, answers
        self._honours_deletion_cost = honours_deletion_cost

    async def carry_out(self, decision: Decision, live: Live) -> None:
        """Set a pool's size; when it shrinks, those with the least in hand go."""
        alive = live.alive(decision.pool)
        surplus = max(0, (decision.current or 0) - decision.wanted)
        if surplus:
            chosen = victims(alive, await self._answers.readiness(alive), surplus)
            for rank, pod in enumerate(chosen):
                await self._mark(pod.name, FIRST_COST + rank)
            if not self._honours_deletion_cost:
                # Old ReplicaSets choose by age: the victims go first, and what replaces them has not started when
                # the number is lowered, so it is what goes.
                for pod in chosen:
                    await self._kube.delete(path_of("v1", "Pod", self._owner.namespace, pod.name))
        await self.set_replicas(decision.pool, decision.wanted)

    async def set_replicas(self, role: str, replicas: int) -> None:
        """Own `spec.replicas` and nothing else."""
        metadata = {"name": child(self._owner.name, role), "namespace": self._owner.namespace}
        item = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": replicas}}
        await self._kube.apply(item, SCALING_MANAGER)

    async def _mark(self, pod: str, cost: int) -> None:
        patch = {"metadata": {"annotations": {DELETION_COST_ANNOTATION: str(cost)}}}
        await self._kube.merge(path_of("v1", "Pod", self._owner.namespace, pod), patch, FIELD_MANAGER)


def needs_owner_of_replicas(deployment: Json) -> bool:
    """Whether the main field manager alone owns `spec.replicas`: its next apply would reset the number to 1."""
    owners = {
        entry.get("manager")
        for entry in deployment["metadata"].get("managedFields", [])
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {}) and entry.get("subresource") != "status"
    }
    return owners == {FIELD_MANAGER}
