"""Asks the API server what it knows: API versions are picked by discovery, so that old and new servers work."""

from __future__ import annotations

import asyncio
import re

from pdserve.log import get_logger
from pdserve.operator.cluster.kube import GoneError, Kube
from pdserve.operator.facts import ClusterFacts
from pdserve.operator.names import API_VERSION, GROUP

logger = get_logger(__name__)

_POLL_S = 2.0
_MONITORING = "/apis/monitoring.coreos.com/v1"


async def discover(kube: Kube, default_image: str) -> ClusterFacts:
    """Facts about the cluster; kinds that are installed later are found at the next start."""
    monitoring = await _kinds(kube, _MONITORING)
    version = await kube.get("/version")
    minor = int(re.sub(r"\D", "", version["minor"]) or 0)
    return ClusterFacts(
        default_image=default_image,
        disruption_budget_api="policy/v1" if await _kinds(kube, "/apis/policy/v1") else "policy/v1beta1",
        has_pod_monitors="PodMonitor" in monitoring,
        has_prometheus_rules="PrometheusRule" in monitoring,
        honours_deletion_cost=(int(version["major"]), minor) >= (1, 22),
    )


async def wait_for_own_kinds(kube: Kube) -> None:
    """Return once the CustomResourceDefinitions are installed."""
    is_told = False
    while not {"PDService", "ScalingPolicy"} <= await _kinds(kube, f"/apis/{API_VERSION}"):
        if not is_told:
            logger.warning("waiting for the CustomResourceDefinitions of %s: kubectl apply -f manifests/crds", GROUP)
            is_told = True
        await asyncio.sleep(_POLL_S)


async def _kinds(kube: Kube, path: str) -> set[str]:
    try:
        return {resource["kind"] for resource in (await kube.get(path))["resources"]}
    except GoneError:
        return set()
