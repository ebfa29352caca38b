"""What exists of a service at one moment: its Deployments and pods. Plain data, which cluster/look.py reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.operator.names import TEMPLATE_LABEL
from pdserve.operator.status.pods_seen import PodSeen

Json = dict[str, Any]


@dataclass(frozen=True)
class Live:
    """Deployments and pods of one service, read together."""

    deployments: dict[str, Json]
    """Objects of the API by role; a role without a Deployment is left out."""
    pods: list[PodSeen]

    def of(self, role: str) -> list[PodSeen]:
        """Pods of one role, terminating ones included."""
        return [pod for pod in self.pods if pod.role == role]

    def alive(self, role: str) -> list[PodSeen]:
        """Pods of one role that do not terminate."""
        return [pod for pod in self.of(role) if not pod.is_terminating]

    def replicas(self, role: str) -> int | None:
        """`spec.replicas` of a role's Deployment; None when there is none."""
        return int(self.deployments[role]["spec"]["replicas"]) if role in self.deployments else None

    def template(self, role: str) -> str:
        """Digest of the template that a role's Deployment carries."""
        made: Json = self.deployments[role]["spec"]["template"]
        return str(made["metadata"].get("labels", {}).get(TEMPLATE_LABEL, ""))
