"""Asks pods what they say of themselves: whether they are ready, why not, and how much they have in hand."""

from __future__ import annotations

import asyncio

import aiohttp

from pdserve.operator.names import REDIS
from pdserve.operator.status.pods_seen import PodSeen
from pdserve.readiness import Readiness, read_readiness

_POD_TIMEOUT_S = 2.0


class PodAnswers:
    """Asks pods over HTTP, all at once and for a short time; a pod that does not answer is left out."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_POD_TIMEOUT_S))

    async def close(self) -> None:
        """Close all connections to pods."""
        await self._session.close()

    async def why_not_ready(self, pods: list[PodSeen]) -> dict[str, Readiness]:
        """Answers by pod name, of pods that run without being ready."""
        return await self._ask([pod for pod in pods if _can_say_why(pod)])

    async def readiness(self, pods: list[PodSeen]) -> dict[str, Readiness]:
        """Answers by pod name, of pods that have an address."""
        return await self._ask([pod for pod in pods if pod.ip])

    async def _ask(self, pods: list[PodSeen]) -> dict[str, Readiness]:
        bodies = await asyncio.gather(*(self._body(f"{pod.metrics_url}/ready") for pod in pods))
        return {pod.name: read_readiness(body) for pod, body in zip(pods, bodies, strict=True) if body is not None}

    async def _body(self, url: str) -> bytes | None:
        try:
            async with self._session.get(url) as response:
                return await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return None


def _can_say_why(pod: PodSeen) -> bool:
    return bool(pod.ip) and pod.has_started and pod.role != REDIS and not (pod.is_ready or pod.is_terminating)
