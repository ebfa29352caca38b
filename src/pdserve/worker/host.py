"""The process around a worker: inbox, registration, heartbeat, generation, drain.

Lifetime of a generation:

    register → (heartbeat: registration, worker, rosters) * → drain or zombie

A *zombie* (its registration is missing or foreign, or its heartbeat was stopped for longer than a TTL) may
have been given up by all others: it aborts everything, tears its peers down, takes a new generation and
registers again. The host never looks into a job; the worker never looks at the registry's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.bus.registry import RegistryView
from pdserve.errors import BusError
from pdserve.log import get_logger
from pdserve.readiness import ReadyReason
from pdserve.reasons import FailReason
from pdserve.worker.identity import Identity
from pdserve.worker.inbox import Inbox
from pdserve.worker.own_registration import OwnRegistration
from pdserve.worker.role_worker import RoleWorker
from pdserve.worker.tasks import TaskSet
from pdserve.worker.transports import WorkerTransports

logger = get_logger(__name__)

_ABANDON_S = 5.0
"""Giving everything up waits for the end of the running step; one that hangs must not keep the process."""


class WorkerHost:
    """Runs one worker on the bus; everything on the event loop."""

    def __init__(
        self,
        worker: RoleWorker,
        identity: Identity,
        registration: OwnRegistration,
        inbox: Inbox,
        transports: WorkerTransports,
        *,
        bus: Bus,
        view: RegistryView,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._identity = identity
        self._registration = registration
        self._inbox = inbox
        self._transports = transports
        self._bus = bus
        self._view = view
        self._clock = clock
        self._heartbeat_s = registration.facts.heartbeat_s
        self._stood_still_s = 0.0
        self._tasks = TaskSet()

    @property
    def ready_reason(self) -> ReadyReason:
        """Why this worker must not get requests; READY when it is registered and takes jobs."""
        if self._worker.is_draining:
            return ReadyReason.DRAINING
        if not self._bus.is_up:
            return ReadyReason.BUS_UNREACHABLE
        return ReadyReason.READY if self._registration.is_announced else ReadyReason.STARTING

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; the caller drains afterwards."""
        self._inbox.open(self._identity.ref, self._worker.handle)
        self._bus.on_new_server(self._on_new_server)
        while not stop.is_set():
            if self._stood_still_s > self._registration.facts.ttl_s:
                await self._become_new(f"this process stood still for {self._stood_still_s:.1f} s")
            self._stood_still_s = 0.0
            await self._beat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._heartbeat_s)

    async def drain(self, timeout_s: float, reason: FailReason = FailReason.DRAINING) -> None:
        """Take nothing new, finish what is in hand for at most `timeout_s`, hand the rest back, deregister.

        `reason` is told with what is handed back: a worker that drains of itself is no fault, one with a defect is.
        """
        self._worker.take_no_more()
        end_s = self._clock() + timeout_s
        logger.info("draining: %d attempts in hand", self._worker.num_held)
        next_beat_s = 0.0
        while self._worker.num_held and self._clock() < end_s:
            if self._clock() >= next_beat_s:
                await self._beat()
                next_beat_s = self._clock() + self._heartbeat_s
            await asyncio.sleep(0.05)
        if self._worker.num_held:
            logger.warning("drain time is over: handing %d attempts back", self._worker.num_held)
        try:
            async with asyncio.timeout(_ABANDON_S):
                await self._worker.abandon(reason)
        except TimeoutError:
            logger.error("a step hangs: leaving without its end")
        try:
            await self._registration.withdraw()
        except BusError as error:
            logger.warning("leaving without a word, the registration will expire: %s", error)
        self._inbox.close()
        self._tasks.cancel()

    # --- heartbeat

    async def notice_standstill(self) -> None:
        """Measure the longest standstill of this process until cancelled, beside `run`; a slow bus is none."""
        interval_s = self._heartbeat_s / 2
        while True:
            began_s = self._clock()
            await asyncio.sleep(interval_s)
            self._stood_still_s = max(self._stood_still_s, self._clock() - began_s - interval_s)

    async def _beat(self) -> None:
        try:
            if await self._registration.is_given_up():
                await self._become_new("its registration is missing or belongs to another process")
            await self._registration.announce(self._worker, len(self._view.gateways))
        except BusError as error:
            logger.debug("heartbeat not delivered: %s", error)  # the bus has said that it is away
        self._worker.heartbeat(self._clock())
        self._worker.attempts.send_rosters(self._view.gateways)

    def _on_new_server(self) -> None:
        """Redis came back empty or failed over: register again and say what we hold, now."""
        self._registration.forget()
        self._tasks.spawn(self._beat())

    # --- generations

    async def _become_new(self, why: str) -> None:
        logger.warning("worker %s starts a new generation: %s", self._identity.worker_id, why)
        await self._worker.abandon(FailReason.RESTARTING)
        self._inbox.close()
        self._registration.forget()
        self._identity.renew()
        await self._transports.reopen(self._identity.ref)
        await self._worker.forget_hand_offs()
        self._inbox.open(self._identity.ref, self._worker.handle)
