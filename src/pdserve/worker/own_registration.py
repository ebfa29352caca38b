"""A worker's own registration: written with each heartbeat, checked, and withdrawn at the end.

Knows when this process was given up by the others; what then has to happen is the host's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry
from pdserve.ids import Fingerprint, KvSignature
from pdserve.registration import WorkerRegistration, WorkerState
from pdserve.worker.identity import Identity
from pdserve.worker.role_worker import RoleWorker


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a registration says that never changes while the process lives."""

    model: str
    fingerprint: Fingerprint
    kv_signature: KvSignature
    block_size: int
    num_blocks: int
    max_model_len: int
    url: str
    node: str
    zone: str
    heartbeat_s: float
    ttl_s: float
    """Life of a registration without heartbeat, in seconds."""


class OwnRegistration:
    """This worker's entry among the registrations.

    Args:
        facts: the constant part.
        identity: under which name; its generation may change.
        bus: where all registrations are.
        descriptors: how peers READ from this worker now, preferred way first.
    """

    def __init__(
        self, facts: WorkerFacts, identity: Identity, bus: Bus, descriptors: Callable[[], list[bytes]]
    ) -> None:
        self.facts = facts
        self._identity = identity
        self._bus = bus
        self._registry = Registry(bus)
        self._descriptors = descriptors
        self._announced_s: float | None = None

    @property
    def is_announced(self) -> bool:
        """Whether the server that answers now was told of this generation."""
        return self._announced_s is not None

    async def announce(self, worker: RoleWorker, num_gateways: int) -> None:
        """Write the registration with the worker's present load.

        Raises:
            BusError: the bus did not take it in time.
        """
        facts, ref = self.facts, self._identity.ref
        registration = WorkerRegistration(
            worker_id=ref.worker_id,
            role=worker.role,
            generation=ref.generation,
            state=WorkerState.DRAINING if worker.is_draining else WorkerState.READY,
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
            window=worker.window(max(1, num_gateways)),
            heartbeat_s=facts.heartbeat_s,
            load=worker.load(),
        )
        await self._registry.announce_worker(registration, facts.ttl_s)
        self._announced_s = self._bus.clock()

    async def is_given_up(self) -> bool:
        """Whether others may take this process for dead: its registration is missing, or is another process's.

        Raises:
            BusError: the bus did not answer in time.
        """
        up_since_s = self._bus.up_since_s
        if self._announced_s is None or up_since_s is None or self._announced_s < up_since_s:
            return False  # the bus was away: an absent registration says nothing
        mine = await self._registry.worker(self._identity.worker_id)
        return mine is None or mine.ref != self._identity.ref

    def forget(self) -> None:
        """Take the registration for missing: the server is another one, or the generation is new."""
        self._announced_s = None

    async def withdraw(self) -> None:
        """Take the registration back, and wait until everything sent so far is on the bus.

        Raises:
            BusError: the bus did not take it in time.
        """
        await self._registry.withdraw_worker(self._identity.worker_id)
        await self._bus.flush()
