"""Looks at every service when something happened to it, and now and then anyway; failures wait longer each time."""

from __future__ import annotations

import asyncio

from pdserve.log import get_logger
from pdserve.operator.clock import Clock
from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import ConflictError, GoneError, Kube, path_of
from pdserve.operator.cluster.pod_answers import PodAnswers
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import API_VERSION
from pdserve.operator.reconcile import ServiceReconciler
from pdserve.operator.telemetry import Telemetry
from pdserve.operator.work_queue import Key, WorkQueue

logger = get_logger(__name__)

_NUM_WORKERS = 8
_MAX_PAUSE_S = 60.0


class ReconcileLoop:
    """All services that one operator looks after."""

    def __init__(
        self, kube: Kube, facts: ClusterFacts, *, resync_s: float, telemetry: Telemetry, clock: Clock | None = None
    ) -> None:
        self._kube, self._facts, self._resync_s, self._telemetry = kube, facts, resync_s, telemetry
        self._clock = clock or Clock()
        self._answers = PodAnswers()
        self.queue = WorkQueue(self._clock.steady_s)
        self._services: dict[Key, ServiceReconciler] = {}
        self._uids: dict[Key, str] = {}
        self._failures: dict[Key, int] = {}

    async def run(self) -> None:
        """Look at services, for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_NUM_WORKERS):
                    tasks.create_task(self._work())
        finally:
            await self._answers.close()

    async def look_at_all(self, namespace: str) -> None:
        """Look at each service of a namespace, after a change that may concern any of them."""
        for key in [key for key in self._services if key[0] == namespace]:
            await self.queue.add(key)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                again_s = await self._look(key)
            finally:
                await self.queue.done(key)
            if again_s is not None:
                await self.queue.add(key, again_s)

    async def _look(self, key: Key) -> float | None:
        """Seconds until the next look; None when the service is gone."""
        try:
            with self._telemetry.reconciling():
                again_s = await self._reconcile(key)
        except GoneError:
            again_s = self._retry_s(key) if await self._exists(key) else None
        except ClusterError as error:
            logger.warning("%s/%s: %s", *key, error)
            again_s = 0.1 if isinstance(error, ConflictError) else self._retry_s(key)
        except Exception:
            # One service's trouble, whatever it is, must not stop the others.
            logger.exception("%s/%s cannot be reconciled", *key)
            again_s = self._retry_s(key)
        else:
            self._failures.pop(key, None)
        if again_s is None:
            self._forget(key)
        return again_s

    async def _reconcile(self, key: Key) -> float | None:
        service = await self._kube.get(path_of(API_VERSION, "PDService", *key))
        metadata = service["metadata"]
        if "deletionTimestamp" in metadata:
            return None  # the garbage collector takes the children
        if self._uids.get(key) != metadata["uid"]:
            owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
            self._uids[key] = metadata["uid"]
            self._services[key] = ServiceReconciler(
                self._kube, owner, self._facts, self._answers, self._resync_s, self._clock
            )
        return await self._services[key].reconcile(service)

    async def _exists(self, key: Key) -> bool:
        try:
            await self._kube.get(path_of(API_VERSION, "PDService", *key))
        except GoneError:
            return False
        except ClusterError:
            return True
        return True

    def _retry_s(self, key: Key) -> float:
        self._telemetry.failed()
        self._failures[key] = self._failures.get(key, 0) + 1
        return float(min(_MAX_PAUSE_S, 0.5 * 2.0 ** min(10, self._failures[key])))

    def _forget(self, key: Key) -> None:
        for memory in (self._services, self._uids, self._failures):
            memory.pop(key, None)
