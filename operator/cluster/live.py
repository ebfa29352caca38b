"""What exists of a service right now: its Deployments and pods, and what pods say of themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdserve.operator.cluster.kube import Kube, path_of
from pdserve.operator.facts import Owner
from pdserve.operator.names import REDIS, ROLE_LABEL, TEMPLATE_LABEL, label_selector, selector
from pdserve.operator.sizing.victims import load_of
from pdserve.operator.status.pods_seen import PodSeen, seen

Json = dict[str, Any]

_POD_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Live:
    """One look."""

    deployments: dict[str, Json]
    """By role."""
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


async def look(kube: Kube, owner: Owner, *, is_cached: bool = True) -> Live:
    """Deployments and pods of one service; `is_cached`: as they were a moment ago, which costs the server less."""
    path = path_of("apps/v1", "Deployment", owner.namespace)
    deployments = await kube.list(path, label_selector(owner.name), is_cached=is_cached)
    by_role = {item["metadata"]["labels"].get(ROLE_LABEL, ""): item for item in deployments}
    wanted = ",".join(f"{name}={value}" for name, value in selector(owner.name, "").items() if value)
    pods = await kube.list(path_of("v1", "Pod", owner.namespace), wanted, is_cached=is_cached) if by_role else []
    return Live(by_role, seen(pods))


class PodAnswers:
    """Asks pods over HTTP, all at once and for a short time; silence is an answer too."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_POD_TIMEOUT_S))

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def why_not_ready(self, pods: list[PodSeen]) -> dict[str, str]:
        """Pod name → what /ready says, of pods that run without being ready."""
        asked = [
            pod for pod in pods if pod.ip and pod.has_started and pod.role != REDIS
            and not (pod.is_ready or pod.is_terminating)
        ]  # fmt: skip
        return await self._ask(asked, "/ready")

    async def loads(self, pods: list[PodSeen]) -> dict[str, float]:
        """Pod name → load; those that do not answer are left out."""
        metrics = await self._ask([pod for pod in pods if pod.ip], "/metrics")
        return {name: load_of(text) for name, text in metrics.items()}

    async def _ask(self, pods: list[PodSeen], path: str) -> dict[str, str]:
        texts = await asyncio.gather(*(self._text(f"{pod.metrics_url}{path}") for pod in pods))
        return {pod.name: text for pod, text in zip(pods, texts, strict=True) if text is not None}

    async def _text(self, url: str) -> str | None:
        try:
            async with self._session.get(url) as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
