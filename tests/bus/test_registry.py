"""Registrations: alive is who has a key; absence counts only when the server has been known for long enough.

On a Redis and on the server in memory alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from pdserve.bus.absence import Absence
from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry, RegistryView
from pdserve.errors import BusError
from pdserve.registration import GatewayRegistration, Role, WorkerLoad, WorkerRef, WorkerRegistration, WorkerState

HEARTBEAT_S = 0.1
TTL_S = 3 * HEARTBEAT_S


@pytest.fixture(params=["redis", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    """The server that the bus of a test is on."""
    return str(request.param)


def worker(worker_id: str = "p1", generation: str = "g1", **changes: Any) -> WorkerRegistration:
    values: dict[str, Any] = {
        "worker_id": worker_id, "role": Role.PREFILL, "generation": generation, "state": WorkerState.READY, "pid": 1,
        "url": "http://h:1", "model": "tiny", "fingerprint": "f", "kv_signature": "s", "block_size": 16,
        "num_blocks": 64, "max_model_len": 512, "descriptors": [b"\x00\xff"], "heartbeat_s": HEARTBEAT_S,
    }  # fmt: skip
    return WorkerRegistration(**values | changes)


GATEWAY = GatewayRegistration(gateway_id="gw", generation="g", pid=2, url="http://h:2", metrics_url="http://h:3")


@pytest.fixture
async def view(bus: Bus) -> AsyncIterator[RegistryView]:
    view = RegistryView(bus, HEARTBEAT_S)
    task = asyncio.create_task(view.run())
    yield view
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def beating(bus: Bus, *registrations: WorkerRegistration) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            with contextlib.suppress(BusError):
                for registration in registrations:
                    await Registry(bus).announce_worker(registration, TTL_S)
            await asyncio.sleep(HEARTBEAT_S / 2)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_registrations_come_back_as_they_were_written(bus: Bus) -> None:
    registration = worker(load=WorkerLoad(num_running=3, step_s=0.25), zone="z")
    await Registry(bus).announce_worker(registration, 5)
    await Registry(bus).announce_gateway(GATEWAY, 5)
    view = RegistryView(bus)
    await view.poll()
    assert view.is_loaded
    assert view.workers == {"p1": registration}
    assert view.gateways == {"gw": GATEWAY}


async def test_a_worker_that_stops_beating_is_gone_after_its_time_to_live(
    bus: Bus, view: RegistryView, until: Any
) -> None:
    changes: list[set[str]] = []
    view.on_change(lambda: changes.append(set(view.workers)))
    async with beating(bus, worker()):
        await until(lambda: "p1" in view.workers)
        await asyncio.sleep(2 * TTL_S)
        assert not view.is_gone(WorkerRef("p1", "g1"))
    await until(lambda: view.is_gone(WorkerRef("p1", "g1")))
    await until(lambda: "p1" not in view.workers)
    await until(lambda: changes[-1] == set())


async def test_a_withdrawn_registration_is_gone(bus: Bus, view: RegistryView, until: Any) -> None:
    await Registry(bus).announce_worker(worker(), 60)
    await Registry(bus).announce_gateway(GATEWAY, 60)
    await until(lambda: view.workers and view.gateways)
    await Registry(bus).withdraw_worker("p1")
    await Registry(bus).withdraw_gateway("gw")
    await until(lambda: view.is_gone(WorkerRef("p1", "g1")) and view.is_gateway_gone("gw"))
    await until(lambda: not view.workers and not view.gateways)


async def test_another_generation_under_the_same_name_means_the_old_one_is_gone(
    bus: Bus, view: RegistryView, until: Any
) -> None:
    async with beating(bus, worker(generation="old")):
        await until(lambda: "p1" in view.workers)
    async with beating(bus, worker(generation="new")):
        await until(lambda: view.is_gone(WorkerRef("p1", "old")))
        await until(lambda: view.workers["p1"].generation == "new")
        assert not view.is_gone(WorkerRef("p1", "new"))


async def test_a_restarted_empty_server_makes_no_process_gone(own_server: Any, own_bus: Bus, until: Any) -> None:
    view = RegistryView(own_bus, HEARTBEAT_S)
    task = asyncio.create_task(view.run())
    mourned: list[str] = []
    view.on_change(lambda: mourned.extend({"p1"} - set(view.workers)))
    registration = worker(heartbeat_s=1.0)
    await Registry(own_bus).announce_worker(registration, 3.0)
    await until(lambda: "p1" in view.workers)
    own_server.stop()
    own_server.start()
    await until(lambda: own_bus.num_reconnects)
    await asyncio.sleep(5 * HEARTBEAT_S)  # several polls that find an empty server
    assert "p1" in view.workers
    assert not view.is_gone(WorkerRef("p1", "g1"))
    await Registry(own_bus).announce_worker(registration, 3.0)
    await asyncio.sleep(5 * HEARTBEAT_S)
    assert not view.is_gone(WorkerRef("p1", "g1"))
    assert mourned == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_server_makes_no_process_gone(own_server: Any, own_bus: Bus, until: Any) -> None:
    view = RegistryView(own_bus, HEARTBEAT_S)
    task = asyncio.create_task(view.run())
    await Registry(own_bus).announce_worker(worker(), TTL_S)
    await until(lambda: "p1" in view.workers)
    own_server.stop()
    await asyncio.sleep(3 * TTL_S)
    assert "p1" in view.workers
    assert not view.is_gone(WorkerRef("p1", "g1"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_registration_that_cannot_be_read_is_ignored(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    await Registry(bus).announce_worker(worker(), 60)
    await bus.execute(("SET", bus.keys.worker("bad"), "{"), ("ZADD", bus.keys.workers, 9e9, "bad"))
    view = RegistryView(bus)
    await view.poll()
    assert set(view.workers) == {"p1"}
    assert "registration of bad" in caplog.text


async def test_an_unchanged_poll_calls_no_callback(bus: Bus) -> None:
    await Registry(bus).announce_worker(worker(), 60)
    view, calls = RegistryView(bus), []
    view.on_change(lambda: calls.append(1))
    await view.poll()
    await view.poll()
    assert len(calls) == 1
    await Registry(bus).announce_worker(worker(load=WorkerLoad(num_running=1)), 60)
    await view.poll()
    assert len(calls) == 2


# --- as keys of a Redis


@pytest.mark.parametrize("kind", ["redis"])
async def test_every_key_has_a_time_to_live_and_the_index_is_on_the_servers_clock(bus: Bus) -> None:
    await Registry(bus).announce_worker(worker(), 5)
    await Registry(bus).announce_gateway(GATEWAY, 5)
    with redis.Redis.from_url(bus.server) as client:
        keys = set(client.scan_iter())
        assert keys == {
            b"pds:{test}:workers", b"pds:{test}:worker:p1", b"pds:{test}:gateways", b"pds:{test}:gateway:gw",
        }  # fmt: skip
        assert all(client.pttl(key) > 0 for key in keys)
        (_, expiry_s), (now_s, _) = client.zrange(bus.keys.workers, 0, -1, withscores=True)[0], client.time()
        assert 3 < expiry_s - now_s < 6


@pytest.mark.parametrize("kind", ["redis"])
async def test_a_dead_workers_name_leaves_the_index_in_the_end(bus: Bus, until: Any) -> None:
    await Registry(bus).announce_worker(worker("old"), 0.01)
    with redis.Redis.from_url(bus.server) as client:
        for _ in range(100):
            await asyncio.sleep(0.02)
            await Registry(bus).announce_worker(worker("new"), 0.01)
            if client.zrange(bus.keys.workers, 0, -1) == [b"new"]:
                return
    pytest.fail("the old name is still in the index")


# --- the pure rule


def test_a_process_once_seen_is_gone_when_missing_after_one_whole_ttl_of_connection() -> None:
    absence: Absence[WorkerRef] = Absence()
    absence.polled({WorkerRef("p1", "g1")}, "run", 0.0)
    absence.polled(set(), "run", 1.0)
    assert not absence.is_gone(WorkerRef("p1", "g1"), 3.0)
    absence.polled(set(), "run", 3.0)
    assert absence.is_gone(WorkerRef("p1", "g1"), 3.0)


def test_an_expired_key_counts_at_once_when_the_connection_is_old_enough() -> None:
    absence: Absence[WorkerRef] = Absence()
    for now_s in range(10):
        absence.polled({WorkerRef("p1", "g1")}, "run", float(now_s))
    absence.polled(set(), "run", 10.0)
    assert absence.is_gone(WorkerRef("p1", "g1"), 3.0)
    assert not absence.is_gone(WorkerRef("p1", "g1"), 11.0)


@pytest.mark.parametrize("breaks", ["another server", "a failed poll"])
def test_a_break_of_the_connection_starts_the_count_anew(breaks: str) -> None:
    absence: Absence[WorkerRef] = Absence()
    for now_s in range(10):
        absence.polled({WorkerRef("p1", "g1")}, "run", float(now_s))
    if breaks == "a failed poll":
        absence.failed()
        assert not absence.is_gone(WorkerRef("p1", "g1"), 3.0)
    run_id = "other" if breaks == "another server" else "run"
    absence.polled(set(), run_id, 10.0)
    absence.polled(set(), run_id, 12.9)
    assert not absence.is_gone(WorkerRef("p1", "g1"), 3.0)
    absence.polled(set(), run_id, 13.0)
    assert absence.is_gone(WorkerRef("p1", "g1"), 3.0)


def test_a_process_never_seen_has_one_ttl_from_the_first_question() -> None:
    absence: Absence[WorkerRef] = Absence()
    for now_s in range(10):
        absence.polled(set(), "run", float(now_s))
    assert not absence.is_gone(WorkerRef("d9", "g1"), 3.0)
    absence.polled(set(), "run", 10.0)
    absence.polled(set(), "run", 12.0)
    assert not absence.is_gone(WorkerRef("d9", "g1"), 3.0)
    absence.polled(set(), "run", 13.0)
    assert absence.is_gone(WorkerRef("d9", "g1"), 3.0)


def test_a_process_that_comes_back_is_not_gone() -> None:
    absence: Absence[WorkerRef] = Absence()
    absence.polled({WorkerRef("p1", "g1")}, "run", 0.0)
    absence.polled(set(), "run", 10.0)
    absence.polled({WorkerRef("p1", "g1")}, "run", 11.0)
    assert not absence.is_gone(WorkerRef("p1", "g1"), 3.0)


def test_processes_long_gone_are_forgotten() -> None:
    absence: Absence[WorkerRef] = Absence()
    for number in range(1000):
        absence.polled({WorkerRef(f"p{number}", "g")}, "run", 10.0 * number)
    assert len(absence._known) < 100
