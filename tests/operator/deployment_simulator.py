"""How Kubernetes' Deployment controller moves pods, in a few lines: the oracle that rollout steps are tested against.

Follows the published algorithm of the rolling update (reconcileNewReplicaSet, cleanupUnhealthyReplicas,
scaleDownOldReplicaSetsForRollingUpdate); a held Deployment's newest pods never count as available.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pdserve.operator.sizing.rollout import PoolSeen, PoolStep


@dataclass
class Pod:
    template: str
    is_ready: bool = False
    has_started: bool = False
    has_node: bool = True


@dataclass
class ReplicaSet:
    template: str
    replicas: int = 0
    is_held: bool = False
    pods: list[Pod] = field(default_factory=list)

    @property
    def available(self) -> int:
        return 0 if self.is_held else sum(pod.is_ready for pod in self.pods)


@dataclass
class Deployment:
    replicas: int
    template: str
    sets: list[ReplicaSet] = field(default_factory=list)
    hold: bool = False
    surge: int = 1
    max_unavailable: int = 0

    def __post_init__(self) -> None:
        pods = [Pod(self.template, True, True) for _ in range(self.replicas)]
        self.sets.append(ReplicaSet(self.template, self.replicas, False, pods))

    @property
    def pods(self) -> list[Pod]:
        return [pod for replica_set in self.sets for pod in replica_set.pods]

    @property
    def ready(self) -> int:
        return sum(pod.is_ready for pod in self.pods)

    def ready_of(self, template: str) -> int:
        return sum(pod.is_ready and pod.template == template for pod in self.pods)

    def apply(self, template: str, step: PoolStep) -> None:
        if step.is_applied:
            self.template, self.hold = template, step.hold
            self.surge, self.max_unavailable = int(step.has_surge), step.max_replaced

    def controller(self, may_place: bool = True) -> None:
        """One pass of the controllers and the scheduler."""
        new = self._newest()
        new.is_held = self.hold
        total = sum(replica_set.replicas for replica_set in self.sets)
        room = self.replicas + self.surge - total
        if room > 0 and new.replicas < self.replicas:
            new.replicas += min(room, self.replicas - new.replicas)
        else:
            self._scale_down(new)
        for replica_set in self.sets:
            self._match(replica_set, may_place)

    def _newest(self) -> ReplicaSet:
        found = next((s for s in self.sets if s.template == self.template), None)
        if found is None:
            found = ReplicaSet(self.template)
            self.sets.append(found)
        return found

    def _scale_down(self, new: ReplicaSet) -> None:
        old = [s for s in self.sets if s is not new and s.replicas]
        total = sum(s.replicas for s in self.sets)
        min_available = self.replicas - self.max_unavailable
        budget = total - min_available - (new.replicas - new.available)
        for replica_set in old:  # unhealthy ones first
            count = min(max(0, budget), replica_set.replicas - replica_set.available)
            replica_set.replicas -= count
            budget -= count
        available = sum(s.available for s in self.sets) - min_available
        for replica_set in old:
            count = min(max(0, available), replica_set.replicas)
            replica_set.replicas -= count
            available -= count

    def _match(self, replica_set: ReplicaSet, may_place: bool) -> None:
        while len(replica_set.pods) < replica_set.replicas:
            replica_set.pods.append(Pod(replica_set.template, has_node=may_place))
        replica_set.pods.sort(key=lambda pod: not pod.is_ready)
        del replica_set.pods[replica_set.replicas :]

    def start_some(self, chance: random.Random, broken: frozenset[str] = frozenset()) -> None:
        for pod in self.pods:
            if pod.has_node and pod.template not in broken and chance.random() < 0.5:
                pod.is_ready = pod.has_started = True

    def place_waiting(self) -> None:
        for pod in self.pods:
            pod.has_node = True

    def seen(self, wanted: str) -> PoolSeen:
        new = [pod for pod in self.pods if pod.template == wanted]
        old = [pod for pod in self.pods if pod.template != wanted]
        return PoolSeen(
            wanted=self.replicas,
            exists=True,
            is_current=self.template == wanted,
            new_total=len(new),
            new_ready=sum(pod.is_ready for pod in new),
            new_unschedulable_s=0.0 if all(pod.has_node for pod in new) else 61.0,
            old_total=len(old),
            old_ready=sum(pod.is_ready for pod in old),
            old_broken=sum(not pod.has_started for pod in old),
        )
