"""Names, labels and ports of everything the operator makes. Outsiders rely on them: they never change."""

from __future__ import annotations

GROUP = "pdserve.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

FIELD_MANAGER = "pdserve-operator"
"""Owns everything but the number of workers."""
SCALING_MANAGER = "pdserve-scaling"
"""Owns `spec.replicas` of the pools, and nothing else, while scaling is not Off."""

GATEWAY, PREFILL, DECODE, REDIS = "gateway", "prefill", "decode", "redis"
POOLS = (PREFILL, DECODE)

ROLE_LABEL = f"{GROUP}/role"
TEMPLATE_LABEL = f"{GROUP}/template"
"""Label of pods: digest of the template that made them."""
SIGNATURE_LABEL = f"{GROUP}/kv-signature"
"""Label of worker pods: digest of all that decides who may exchange KV blocks."""
APPLIED_ANNOTATION = f"{GROUP}/applied"
"""Annotation of every child: digest of what was applied; nothing is sent while it is the same."""
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"

METRICS_PORT = 9100
API_PORT = 8000
REDIS_PORT = 6379

_APP = "app.kubernetes.io"


def child(service: str, role: str) -> str:
    """Name of a role's Deployment, and of what belongs to it."""
    return f"{service}-{role}"


def selector(service: str, role: str) -> dict[str, str]:
    """Labels that select the pods of one role; immutable in a Deployment."""
    return {f"{_APP}/name": "pdserve", f"{_APP}/instance": service, ROLE_LABEL: role}


def labels(service: str, role: str | None = None) -> dict[str, str]:
    """Labels of a child."""
    base = {f"{_APP}/name": "pdserve", f"{_APP}/instance": service, f"{_APP}/managed-by": FIELD_MANAGER}
    return base | ({ROLE_LABEL: role, f"{_APP}/component": role} if role else {})


def label_selector(service: str | None = None) -> str:
    """Query for the children of one service, or of all."""
    query = f"{_APP}/managed-by={FIELD_MANAGER}"
    return f"{query},{_APP}/instance={service}" if service else query


def service_of(labels_of_child: dict[str, str]) -> str | None:
    """Name of the service that a child belongs to; None when it is not ours."""
    is_ours = labels_of_child.get(f"{_APP}/managed-by") == FIELD_MANAGER
    return labels_of_child.get(f"{_APP}/instance") if is_ours else None
