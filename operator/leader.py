"""One operator acts at a time: who holds the Lease. The others wait, and one takes over when it is not renewed.

Times are compared by this process's own clock: it counts how long it has seen the same renewal, so clocks of
different nodes need not agree.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Any

from pdserve.log import get_logger
from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import ConflictError, GoneError, Kube, path_of

logger = get_logger(__name__)

Json = dict[str, Any]

LEASE_NAME = "pdserve-operator"
_API = "coordination.k8s.io/v1"


class Leadership:
    """What one process does to hold the Lease."""

    def __init__(self, kube: Kube, namespace: str, identity: str, lease_s: float) -> None:
        self._kube, self._identity, self._lease_s = kube, identity, lease_s
        self._collection = path_of(_API, "Lease", namespace)
        self._path = path_of(_API, "Lease", namespace, LEASE_NAME)
        self._seen: tuple[str, str] | None = None
        self._seen_s = 0.0

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        while not await self._try():  # noqa: ASYNC110  another process holds it: there is no event to await
            await asyncio.sleep(self._lease_s / 5)
        logger.info("%s leads", self._identity)

    async def keep(self) -> None:
        """Renew; returns when leadership is lost, or could not be renewed in time."""
        renewed_s = time.monotonic()
        while time.monotonic() - renewed_s < self._lease_s * 2 / 3:
            await asyncio.sleep(self._lease_s / 3)
            try:
                # A server that answers late must not make us lead when another one does already.
                async with asyncio.timeout(self._lease_s / 3):
                    lease = await self._kube.get(self._path)
                    if lease["spec"].get("holderIdentity") != self._identity:
                        break
                    asked_s = time.monotonic()
                    await self._write(lease, self._identity)
                    renewed_s = asked_s
            except TimeoutError:
                logger.warning("leadership not renewed: the API server is slow")
            except ClusterError as error:
                logger.warning("leadership not renewed: %s", error)
        logger.error("%s does not lead any more", self._identity)

    async def release(self) -> None:
        """Give the Lease back, so that another process may lead at once."""
        try:
            lease = await self._kube.get(self._path)
            if lease["spec"].get("holderIdentity") == self._identity:
                await self._write(lease, "")
        except ClusterError as error:
            logger.warning("leadership not released: %s", error)

    async def _try(self) -> bool:
        try:
            lease = await self._kube.get(self._path)
            if not self._is_free(lease["spec"]):
                return False
            await self._write(lease, self._identity)
        except GoneError:
            return await self._create()
        except ClusterError as error:
            logger.warning("cannot take the Lease: %s", error)
            return False
        return True

    def _is_free(self, spec: Json) -> bool:
        holder, renewal = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
        if self._seen != (holder, renewal):
            self._seen, self._seen_s = (holder, renewal), time.monotonic()
        duration_s = spec.get("leaseDurationSeconds") or self._lease_s
        return holder in ("", self._identity) or time.monotonic() - self._seen_s > duration_s

    async def _create(self) -> bool:
        lease = {"apiVersion": _API, "kind": "Lease", "metadata": {"name": LEASE_NAME}, "spec": self._spec({}, True)}
        try:
            await self._kube.create(self._collection, lease)
        except ConflictError:
            return False
        return True

    async def _write(self, lease: Json, holder: str) -> None:
        is_new = bool(holder) and lease["spec"].get("holderIdentity") != holder
        await self._kube.replace(self._path, lease | {"spec": self._spec(lease["spec"], is_new, holder)})

    def _spec(self, before: Json, is_new: bool, holder: str | None = None) -> Json:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity if holder is None else holder,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "acquireTime": now if is_new else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (1 if is_new and before else 0),
        }
