"""Pods as the operator sees them: one small record out of each pod object. Pure."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.operator.names import METRICS_PORT, ROLE_LABEL, SIGNATURE_LABEL, TEMPLATE_LABEL
from pdserve.operator.status.reasons import Reason

Json = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """Something that keeps a pod from being ready, for programs and for people."""

    reason: Reason
    message: str
    """One sentence, which says what to do where a user can do something."""


@dataclass(frozen=True)
class PodSeen:
    """One pod, reduced to what the operator decides by."""

    name: str
    role: str
    template: str
    """Digest of the template that made it."""
    signature: str
    is_terminating: bool
    is_ready: bool
    has_started: bool
    """Its startup probe has passed once, and it has not crashed since."""
    unschedulable_since_s: float | None
    """Wall clock; None when it has a node, or the scheduler has not tried yet."""
    problem: Problem | None
    """What the API server says is wrong with it; None when it is fine or on its way."""
    ip: str
    created_s: float

    @property
    def metrics_url(self) -> str:
        """Base URL of its port named `metrics`."""
        return f"http://{self.ip}:{METRICS_PORT}"


def seen(pods: Iterable[Json]) -> list[PodSeen]:
    """Records of pods that have not ended."""
    return [_seen(pod) for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]


def wall_seconds(timestamp: str) -> float:
    """`2026-01-31T12:00:00Z` → seconds since the epoch."""
    return float(calendar.timegm(time.strptime(timestamp[:19], "%Y-%m-%dT%H:%M:%S")))


def _seen(pod: Json) -> PodSeen:
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    scheduled = conditions.get("PodScheduled", {})
    is_unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return PodSeen(
        name=metadata["name"],
        role=labels.get(ROLE_LABEL, ""),
        template=labels.get(TEMPLATE_LABEL, ""),
        signature=labels.get(SIGNATURE_LABEL, ""),
        is_terminating="deletionTimestamp" in metadata,
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        has_started=bool(containers) and all(container.get("started") for container in containers),
        unschedulable_since_s=wall_seconds(scheduled["lastTransitionTime"]) if is_unschedulable else None,
        problem=_problem(pod, scheduled if is_unschedulable else None, containers),
        ip=status.get("podIP", ""),
        created_s=wall_seconds(metadata["creationTimestamp"]),
    )


def _problem(pod: Json, unscheduled: Json | None, containers: list[Json]) -> Problem | None:
    name = pod["metadata"]["name"]
    if unscheduled is not None:
        return Problem(Reason.UNSCHEDULABLE, f"no node can take a pod: {unscheduled.get('message', '')}")
    for container in containers:
        waiting = container.get("state", {}).get("waiting", {})
        found = _waiting_problem(name, waiting.get("reason", ""), waiting.get("message", ""), container)
        if found:
            return found
    return None


def _waiting_problem(pod: str, reason: str, message: str, container: Json) -> Problem | None:
    if reason == "CreateContainerConfigError":
        # The kubelet gives one reason for both, and names what is missing in its message alone.
        missing = Reason.MISSING_SECRET if "secret" in message.lower() else Reason.MISSING_CONFIG
        return Problem(missing, f"{message}: create it with the named key, and the pods start by themselves")
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
        image = container.get("image", "")
        message = f"image {image} cannot be pulled: check spec.image and spec.imagePullSecrets"
        return Problem(Reason.IMAGE_PULL_FAILED, message)
    if reason == "CrashLoopBackOff":
        ended = container.get("lastState", {}).get("terminated", {})
        words = (ended.get("message") or ended.get("reason") or "").strip().splitlines()
        last = f" ({words[-1]})" if words else ""
        code = ended.get("exitCode", "?")
        role = pod.rsplit("-", 2)[0]
        message = f"{role} exits with {code}{last}: kubectl logs --previous deployment/{role}"
        return Problem(Reason.CRASH_LOOPING, message)
    return None
