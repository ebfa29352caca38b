"""Reads what exists of a service from the API server."""

from __future__ import annotations

from pdserve.operator.cluster.kube import Kube, path_of
from pdserve.operator.facts import Owner
from pdserve.operator.names import ROLE_LABEL, label_selector, selector
from pdserve.operator.status.live import Live
from pdserve.operator.status.pods_seen import seen


async def look(kube: Kube, owner: Owner, *, is_cached: bool = True) -> Live:
    """Deployments and pods of one service; `is_cached`: as they were a moment ago, which costs the server less."""
    path = path_of("apps/v1", "Deployment", owner.namespace)
    deployments = await kube.list(path, label_selector(owner.name), is_cached=is_cached)
    by_role = {item["metadata"]["labels"].get(ROLE_LABEL, ""): item for item in deployments}
    wanted = ",".join(f"{name}={value}" for name, value in selector(owner.name, "").items() if value)
    pods = await kube.list(path_of("v1", "Pod", owner.namespace), wanted, is_cached=is_cached) if by_role else []
    return Live(by_role, seen(pods))
