"""How well one role of a service does, and why: from pods and Deployment to one verdict. Pure.

Reasons separate *no capacity* (Unschedulable, CannotCreatePods) from *not ready yet* (Starting, WaitingForVolumes)
from *broken* (MissingSecret, ImagePullFailed, CrashLooping, RedisUnavailable, TransfersFailing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.operator.status.pods_seen import PodSeen

Json = dict[str, Any]

NOT_BROKEN = frozenset({"Ready", "Starting", "RollingOut", "ScaledToZero", "WaitingForVolumes"})
_GRACE_S = 60.0
"""A pod that has been without containers for longer waits for something that does not exist."""
_WORDS = (
    ("bus does not answer", "RedisUnavailable", "the bus does not answer: is Redis running, and its password right?"),
    ("not registered", "RedisUnavailable", "a worker cannot register on the bus: is Redis running?"),
    ("transfer", "TransfersFailing", "KV transfers keep failing: look at the workers' logs and NetworkPolicies"),
    ("transport", "TransfersFailing", "no transport is usable: look at the workers' logs"),
)
"""Words in a worker's own answer of /ready → reason and sentence."""


@dataclass(frozen=True)
class Health:
    """Of one role."""

    is_ready: bool
    reason: str
    message: str

    @property
    def is_broken(self) -> bool:
        """Something must be done."""
        return self.reason not in NOT_BROKEN


def role_health(
    role: str,
    wanted: int,
    deployment: Json | None,
    pods: Sequence[PodSeen],
    answers: Mapping[str, str],
    now_s: float,
) -> Health:
    """One role's verdict.

    Args:
        role: which.
        wanted: pods.
        deployment: as it is on the server.
        pods: of this role, those that terminate included.
        answers: pod name → why it is not ready, in its own words.
        now_s: wall clock.
    """
    alive = [pod for pod in pods if not pod.is_terminating]
    ready = sum(pod.is_ready for pod in alive)
    problem = _first_problem(deployment, alive, answers, wanted - ready, now_s)
    if wanted == 0:
        return Health(True, "ScaledToZero", f"No {role} pod is wanted.")
    if ready >= wanted:
        return Health(True, "Ready", f"All {role} pods are ready.")
    if problem is not None:
        return Health(False, problem[0], f"{role}: {problem[1]}")
    return Health(False, "Starting", f"Waiting for {role} pods.")


def worst_problem(alive: Sequence[PodSeen]) -> tuple[str, str] | None:
    """A problem of any pod, also of one that is not needed for readiness (a surge)."""
    return next((pod.problem for pod in alive if pod.problem), None)


def _first_problem(
    deployment: Json | None, alive: Sequence[PodSeen], answers: Mapping[str, str], missing: int, now_s: float
) -> tuple[str, str] | None:
    problem = worst_problem(alive)
    if problem is not None:
        return problem
    for pod in alive:
        said = _own_words(answers.get(pod.name, ""))
        if said is not None:
            return said
    if missing > 0 and len(alive) < missing + sum(pod.is_ready for pod in alive):
        refused = _refusal(deployment)
        if refused is not None:
            return refused
    if any(not pod.is_ready and not pod.ip and now_s - pod.created_s > _GRACE_S for pod in alive):
        return (
            "WaitingForVolumes",
            "a pod waits for its volumes: do its Secret and claim exist? See kubectl describe pod",
        )
    return None


def _own_words(said: str) -> tuple[str, str] | None:
    return next(((reason, sentence) for words, reason, sentence in _WORDS if words in said), None)


def _refusal(deployment: Json | None) -> tuple[str, str] | None:
    conditions = (deployment or {}).get("status", {}).get("conditions", [])
    for condition in conditions:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return "CannotCreatePods", f"pods are refused: {condition.get('message', '')}"
    return None
