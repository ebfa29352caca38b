"""What builders must know beside the spec: whose children they make, and what the cluster can do. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.operator.names import API_VERSION


@dataclass(frozen=True)
class Owner:
    """The PDService that owns the children."""

    name: str
    namespace: str
    uid: str

    @property
    def reference(self) -> dict[str, Any]:
        """An ownerReference: the garbage collector removes the children, so no finalizer is needed."""
        return {"apiVersion": API_VERSION, "kind": "PDService", "name": self.name, "uid": self.uid, "controller": True}


@dataclass(frozen=True)
class ClusterFacts:
    """What discovery said; the defaults are a present-day cluster without Prometheus."""

    default_image: str = "pdserve:latest"
    disruption_budget_api: str = "policy/v1"
    has_pod_monitors: bool = False
    has_prometheus_rules: bool = False
    honours_deletion_cost: bool = True
    """ReplicaSets look at pod-deletion-cost since Kubernetes 1.22."""
