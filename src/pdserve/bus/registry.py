"""Registrations on the bus: a process writes its own with every heartbeat, and polls those of all others.

The index (a ZSET) only names whom to ask for; alive is who has a key. No process scans, and no host's wall
clock is compared with another's: expiry times in the index are on the server's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from pdserve.bus.absence import Absence
from pdserve.bus.bus import Bus, call_all
from pdserve.bus.client import Command
from pdserve.errors import BusError
from pdserve.ids import GatewayId, WorkerId
from pdserve.log import get_logger
from pdserve.registration import HEARTBEAT_S, GatewayRegistration, WorkerRef, WorkerRegistration

_log = get_logger(__name__)

R = TypeVar("R", WorkerRegistration, GatewayRegistration)
Id = TypeVar("Id", bound=str)

INDEX_TTLS = 20
"""The index outlives a registration by this factor; expired names are removed from it after as long."""


class Registry:
    """Writes registrations, and reads one when it matters now."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def announce_worker(self, registration: WorkerRegistration, ttl_s: float) -> None:
        """Register a worker, or keep it registered.

        Raises:
            BusError: the bus did not take it in time.
        """
        keys = self._bus.keys
        await self._announce(
            keys.workers, registration.worker_id, keys.worker(registration.worker_id), registration, ttl_s
        )

    async def announce_gateway(self, registration: GatewayRegistration, ttl_s: float) -> None:
        """Register a gateway, or keep it registered.

        Raises:
            BusError: the bus did not take it in time.
        """
        keys = self._bus.keys
        key = keys.gateway(registration.gateway_id)
        await self._announce(keys.gateways, registration.gateway_id, key, registration, ttl_s)

    async def worker(self, worker_id: WorkerId) -> WorkerRegistration | None:
        """A worker's registration as it is now, or None.

        Raises:
            BusError: the bus did not answer in time.
        """
        (value,) = await self._bus.execute(("GET", self._bus.keys.worker(worker_id)))
        return _read(WorkerRegistration, worker_id, value) if value is not None else None

    async def withdraw_worker(self, worker_id: WorkerId) -> None:
        """Take a worker's registration back."""
        await self._withdraw(self._bus.keys.workers, worker_id, self._bus.keys.worker(worker_id))

    async def withdraw_gateway(self, gateway_id: GatewayId) -> None:
        """Take a gateway's registration back."""
        await self._withdraw(self._bus.keys.gateways, gateway_id, self._bus.keys.gateway(gateway_id))

    async def _announce(self, index: str, name: str, key: str, registration: msgspec.Struct, ttl_s: float) -> None:
        now_s, ttl_ms = self._bus.server_time_s(), max(1, int(1000 * ttl_s))
        await self._bus.execute(
            ("SET", key, msgspec.json.encode(registration), "PX", ttl_ms),
            ("ZADD", index, now_s + ttl_s, name),
            ("ZREMRANGEBYSCORE", index, "-inf", now_s - INDEX_TTLS * ttl_s),
            ("PEXPIRE", index, INDEX_TTLS * ttl_ms),
        )

    async def _withdraw(self, index: str, name: str, key: str) -> None:
        await self._bus.execute(("DEL", key), ("ZREM", index, name))


class RegistryView:
    """The registrations of all processes, polled once a heartbeat."""

    def __init__(self, bus: Bus, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._bus = bus
        self._heartbeat_s = heartbeat_s
        self._workers_absence: Absence[WorkerRef] = Absence()
        self._gateways_absence: Absence[GatewayId] = Absence()
        self._callbacks: list[Callable[[], None]] = []
        self.workers: dict[WorkerId, WorkerRegistration] = {}
        """Last known, by id; those whose key vanished stay until their absence counts."""
        self.gateways: dict[GatewayId, GatewayRegistration] = {}
        self.is_loaded = False
        """Whether a poll has succeeded yet."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back after each poll that found anything new: a process came, went, or reported another load."""
        self._callbacks.append(callback)

    def is_gone(self, worker: WorkerRef) -> bool:
        """Whether this very worker process is known to be gone: key absent, or another generation's."""
        return self._workers_absence.is_gone(worker, self._worker_ttl_s(worker.worker_id))

    def is_gateway_gone(self, gateway_id: GatewayId) -> bool:
        """Whether this gateway is known to be gone."""
        return self._gateways_absence.is_gone(gateway_id, 3 * self._heartbeat_s)

    async def run(self) -> None:
        """Poll until cancelled. A bus that is away changes nothing here."""
        while True:
            try:
                await self.poll()
            except BusError:
                self._workers_absence.failed()
                self._gateways_absence.failed()
            except Exception:
                _log.exception("polling the registrations failed: a programming error")
            await asyncio.sleep(self._heartbeat_s)

    async def poll(self) -> None:
        """Read all registrations once.

        Raises:
            BusError: the bus did not answer in time.
        """
        keys = self._bus.keys
        info, worker_ids, gateway_ids = await self._bus.execute(
            ("INFO", "server"), ("ZRANGE", keys.workers, 0, -1), ("ZRANGE", keys.gateways, 0, -1), transaction=False
        )
        workers = await self._fetch(WorkerRegistration, [WorkerId(name.decode()) for name in worker_ids], keys.worker)
        gateways = await self._fetch(
            GatewayRegistration, [GatewayId(name.decode()) for name in gateway_ids], keys.gateway
        )
        run_id, now_s = str(info["run_id"]), self._bus.clock()
        self._workers_absence.polled({worker.ref for worker in workers.values()}, run_id, now_s)
        self._gateways_absence.polled(gateways.keys(), run_id, now_s)
        self._take_over(workers, gateways)

    async def _fetch(self, kind: type[R], ids: Sequence[Id], key_of: Callable[[Id], str]) -> dict[Id, R]:
        if not ids:
            return {}
        command: Command = ("MGET", *(key_of(id_) for id_ in ids))
        (values,) = await self._bus.execute(command)
        registrations: dict[Id, R] = {}
        for id_, value in zip(ids, values, strict=True):
            registration = _read(kind, id_, value) if value is not None else None
            if registration is not None:
                registrations[id_] = registration
        return registrations

    def _take_over(
        self, workers: dict[WorkerId, WorkerRegistration], gateways: dict[GatewayId, GatewayRegistration]
    ) -> None:
        kept_workers = {name: worker for name, worker in self.workers.items() if not self.is_gone(worker.ref)}
        kept_gateways = {name: gateway for name, gateway in self.gateways.items() if not self.is_gateway_gone(name)}
        before = self.is_loaded, self.workers, self.gateways
        self.workers, self.gateways, self.is_loaded = kept_workers | workers, kept_gateways | gateways, True
        if before != (self.is_loaded, self.workers, self.gateways):
            call_all(self._callbacks)

    def _worker_ttl_s(self, worker_id: WorkerId) -> float:
        worker = self.workers.get(worker_id)
        return 3 * (worker.heartbeat_s if worker else self._heartbeat_s)


def _read(kind: type[R], name: str, value: bytes) -> R | None:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        _log.error("the registration of %s cannot be read and is ignored: %s", name, error)
        return None
