"""How well one role of a service does, and why: from pods, their own answers and the Deployment to one verdict. Pure.

Reasons separate *no capacity* (Unschedulable, CannotCreatePods) from *not ready yet* (Starting, WaitingForVolumes)
from *broken* (MissingSecret, ImagePullFailed, CrashLooping, RedisUnavailable, TransfersFailing, StepHangs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.operator.status.pods_seen import PodSeen, Problem
from pdserve.operator.status.reasons import Reason
from pdserve.readiness import Readiness, ReadyReason

Json = dict[str, Any]

NOT_BROKEN = frozenset(
    {
        Reason.READY,
        Reason.STARTING,
        Reason.WAITING_FOR_VOLUMES,
        Reason.DRAINING,
        Reason.SCALED_TO_ZERO,
        Reason.UNKNOWN,
        Reason.ROLLING_OUT,
    }
)
_GRACE_S = 60.0
"""A pod that has been without containers for longer waits for something that does not exist."""
_REASON_OF: Mapping[ReadyReason, Reason] = {
    ReadyReason.STARTING: Reason.STARTING,
    ReadyReason.BUS_UNREACHABLE: Reason.REDIS_UNAVAILABLE,
    ReadyReason.NO_TRANSPORT: Reason.TRANSFERS_FAILING,
    ReadyReason.STEP_HANGS: Reason.STEP_HANGS,
    ReadyReason.NO_WORKERS: Reason.STARTING,
    ReadyReason.DRAINING: Reason.DRAINING,
    ReadyReason.UNKNOWN: Reason.UNKNOWN,
}
"""What a pod says of itself → the reason that conditions show. A pod that says `ready` has no problem."""


@dataclass(frozen=True)
class Health:
    """The verdict on one role."""

    is_ready: bool
    reason: Reason
    message: str

    @property
    def is_broken(self) -> bool:
        """Whether something must be done about it."""
        return self.reason not in NOT_BROKEN


def role_health(
    role: str,
    wanted: int,
    deployment: Json | None,
    pods: Sequence[PodSeen],
    answers: Mapping[str, Readiness],
    now_s: float,
) -> Health:
    """The verdict on one role.

    Args:
        role: gateway, prefill, decode or redis.
        wanted: number of pods that shall be ready.
        deployment: as it is on the server.
        pods: all of this role, those that terminate included.
        answers: pod name → what its /ready says, for pods that run without being ready.
        now_s: wall clock.
    """
    alive = [pod for pod in pods if not pod.is_terminating]
    ready = sum(pod.is_ready for pod in alive)
    if wanted == 0:
        return Health(True, Reason.SCALED_TO_ZERO, f"No {role} pod is wanted.")
    if ready >= wanted:
        return Health(True, Reason.READY, f"All {role} pods are ready.")
    problem = _first_problem(deployment, alive, answers, wanted - ready, now_s)
    if problem is not None:
        return Health(False, problem.reason, f"{role}: {problem.message}")
    return Health(False, Reason.STARTING, f"Waiting for {role} pods.")


def worst_problem(alive: Sequence[PodSeen]) -> Problem | None:
    """A problem of any pod, also of one that is not needed for readiness (a surge)."""
    return next((pod.problem for pod in alive if pod.problem), None)


def _first_problem(
    deployment: Json | None, alive: Sequence[PodSeen], answers: Mapping[str, Readiness], missing: int, now_s: float
) -> Problem | None:
    said = _own_problems([answers[pod.name] for pod in alive if pod.name in answers])
    broken = next((problem for problem in said if problem.reason not in NOT_BROKEN), None)
    return (
        worst_problem(alive)
        or broken
        or _refusal(deployment, len(alive) < missing + sum(pod.is_ready for pod in alive))
        or _volume_problem(alive, now_s)
        or next(iter(said), None)
    )


def _own_problems(answers: Sequence[Readiness]) -> list[Problem]:
    return [Problem(_REASON_OF[answer.reason], answer.message) for answer in answers if answer.reason in _REASON_OF]


def _refusal(deployment: Json | None, lacks_pods: bool) -> Problem | None:
    conditions = (deployment or {}).get("status", {}).get("conditions", []) if lacks_pods else []
    for condition in conditions:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return Problem(Reason.CANNOT_CREATE_PODS, f"pods are refused: {condition.get('message', '')}")
    return None


def _volume_problem(alive: Sequence[PodSeen], now_s: float) -> Problem | None:
    if not any(not pod.is_ready and not pod.ip and now_s - pod.created_s > _GRACE_S for pod in alive):
        return None
    message = "a pod waits for its volumes: do its Secret and claim exist? See kubectl describe pod"
    return Problem(Reason.WAITING_FOR_VOLUMES, message)
