"""The process around a worker's policy: inbox, registration, heartbeat, generation, drain.

Lifetime of a generation:

    register → (heartbeat: registration, rosters, policy) * → drain or zombie

A *zombie* (its registration is missing or foreign, or its heartbeat was stopped for longer than a TTL) may
have been given up by everybody: it aborts everything, tears its peers down, takes a new generation and
registers again. The host never looks into a job; the policy never looks at the registry's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry, RegistryView
from pdserve.errors import BusError
from pdserve.log import get_logger
from pdserve.readiness import ReadyReason
from pdserve.reasons import FailReason
from pdserve.registration import WorkerRegistration, WorkerState
from pdserve.worker.identity import Identity
from pdserve.worker.inbox import Inbox
from pdserve.worker.role import Policy
from pdserve.worker.tasks import TaskSet

logger = get_logger(__name__)

_ABANDON_S = 5.0
"""Giving everything up waits for the end of the running step; one that hangs must not keep the process."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a registration says that never changes while the process lives."""

    model: str
    fingerprint: str
    kv_signature: str
    block_size: int
    num_blocks: int
    max_model_len: int
    url: str
    node: str
    zone: str
    heartbeat_s: float
    ttl_s: float
    """Life of a registration without heartbeat."""


class WorkerHost:
    """Runs one policy on the bus; everything on the event loop."""

    def __init__(
        self,
        identity: Identity,
        policy: Policy,
        facts: WorkerFacts,
        *,
        bus: Bus,
        registry: Registry,
        view: RegistryView,
        inbox: Inbox,
        draining: asyncio.Event,
        descriptors: Callable[[], list[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._policy = policy
        self._facts = facts
        self._bus = bus
        self._registry = registry
        self._view = view
        self._inbox = inbox
        self._draining = draining
        self._descriptors = descriptors
        self._clock = clock
        self._announced_s: float | None = None
        self._stood_still_s = 0.0
        self._tasks = TaskSet()

    @property
    def ready_reason(self) -> ReadyReason:
        """Why this worker must not get requests; READY when it is registered and takes jobs."""
        if self._draining.is_set():
            return ReadyReason.DRAINING
        if not self._bus.is_up:
            return ReadyReason.BUS_UNREACHABLE
        return ReadyReason.READY if self._announced_s is not None else ReadyReason.STARTING

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; the caller drains afterwards."""
        self._inbox.open(self._identity.peer, self._policy.handle)
        self._bus.on_new_server(self._on_new_server)
        while not stop.is_set():
            if self._stood_still_s > self._facts.ttl_s:
                await self._become_new(f"this process stood still for {self._stood_still_s:.1f} s")
            self._stood_still_s = 0.0
            await self._beat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._facts.heartbeat_s)

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what is in hand for at most `timeout_s`, hand the rest back, deregister."""
        self._draining.set()
        end_s = self._clock() + timeout_s
        logger.info("draining: %d attempts in hand", self._policy.num_held)
        next_beat_s = 0.0
        while self._policy.num_held and self._clock() < end_s:
            if self._clock() >= next_beat_s:
                await self._beat()
                next_beat_s = self._clock() + self._facts.heartbeat_s
            await asyncio.sleep(0.05)
        if self._policy.num_held:
            logger.warning("drain time is over: handing %d attempts back", self._policy.num_held)
        try:
            async with asyncio.timeout(_ABANDON_S):
                await self._policy.abandon(FailReason.DRAINING)
        except TimeoutError:
            logger.error("a step hangs: leaving without its end")
        try:
            await self._registry.withdraw_worker(self._identity.worker_id)
            await self._bus.flush()
        except BusError as error:
            logger.warning("leaving without a word, the registration will expire: %s", error)
        self._inbox.close()
        self._tasks.cancel()

    # --- heartbeat

    async def notice_standstill(self) -> None:
        """Measure the longest standstill of this process until cancelled, beside `run`; a slow bus is none."""
        interval_s = self._facts.heartbeat_s / 2
        while True:
            began_s = self._clock()
            await asyncio.sleep(interval_s)
            self._stood_still_s = max(self._stood_still_s, self._clock() - began_s - interval_s)

    async def _beat(self) -> None:
        try:
            if await self._is_given_up():
                await self._become_new("its registration is missing or belongs to another process")
            await self._announce()
        except BusError as error:
            logger.warning("heartbeat not delivered: %s", error)
        self._policy.attempts.publish_held_back()
        self._policy.heartbeat(self._clock())
        self._send_rosters()

    async def _is_given_up(self) -> bool:
        up_since_s = self._bus.up_since_s
        if self._announced_s is None or up_since_s is None or self._announced_s < up_since_s:
            return False  # the bus was away: an absent registration says nothing
        mine = await self._registry.worker(self._identity.worker_id)
        return mine is None or mine.generation != self._identity.generation

    async def _announce(self) -> None:
        facts = self._facts
        num_gateways = max(1, len(self._view.gateways))
        registration = WorkerRegistration(
            worker_id=self._identity.worker_id,
            role=self._policy.role,
            generation=self._identity.generation,
            state=WorkerState.DRAINING if self._draining.is_set() else WorkerState.READY,
            pid=os.getpid(),
            url=facts.url,
            model=facts.model,
            fingerprint=facts.fingerprint,
            kv_signature=facts.kv_signature,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            descriptors=self._descriptors(),
            node=facts.node,
            zone=facts.zone,
            window=self._policy.window(num_gateways),
            heartbeat_s=facts.heartbeat_s,
            load=self._policy.load(),
        )
        await self._registry.announce_worker(registration, self._facts.ttl_s)
        self._announced_s = self._clock()

    def _send_rosters(self) -> None:
        gateway_ids = self._policy.attempts.gateway_ids() | set(self._view.gateways)
        for gateway_id in gateway_ids:
            self._bus.send(self._bus.keys.tokens(gateway_id), self._policy.attempts.roster(gateway_id))

    def _on_new_server(self) -> None:
        """Redis came back empty or failed over: register again and say what we hold, now."""
        self._announced_s = None
        self._tasks.spawn(self._beat())

    # --- generations

    async def _become_new(self, why: str) -> None:
        logger.warning("worker %s starts a new generation: %s", self._identity.worker_id, why)
        await self._policy.abandon(FailReason.RESTARTING)
        self._inbox.close()
        self._identity.renew()
        await self._policy.reconnect()
        self._announced_s = None
        self._inbox.open(self._identity.peer, self._policy.handle)
