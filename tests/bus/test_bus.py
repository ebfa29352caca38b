"""The writer and the watch: order, packing, bounds, outages; always against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from pdserve.bus.bus import Bus
from pdserve.bus.client import connect
from pdserve.errors import BusError
from pdserve.local.redis_server import RedisServer
from pdserve.messages import Cancel, ResendTokens, decode

Numbered = Callable[[int], Cancel]


def entries_of(url: str, stream: str) -> list[list[Any]]:
    with redis.Redis.from_url(url) as client:
        return [decode(fields[b"m"]) for _, fields in client.xrange(stream)]


async def delivered(bus: Bus) -> None:
    """Flush as often as a loaded machine needs; the test's own timeout is the limit."""
    while True:
        with contextlib.suppress(BusError):
            return await bus.flush()


async def test_no_key_is_without_a_time_to_live(bus: Bus, numbered: Numbered) -> None:
    bus.send("stream", numbered(0))
    await bus.flush()
    with redis.Redis.from_url(bus.server) as client:
        assert {key: 0 < client.pttl(key) <= 600_000 for key in client.scan_iter()} == {b"stream": True}


async def test_150_concurrent_publishers_share_the_connection_and_lose_nothing(bus: Bus, numbered: Numbered) -> None:
    async def publish(publisher: int) -> None:
        for number in range(20):
            bus.send(f"stream-{publisher}", numbered(number))
            await asyncio.sleep(0)

    await asyncio.gather(*(publish(publisher) for publisher in range(150)))
    await bus.flush()
    for publisher in range(150):
        entries = entries_of(bus.server, f"stream-{publisher}")
        assert [m.attempt for entry in entries for m in entry] == list(range(20))
    with redis.Redis.from_url(bus.server) as client:
        assert client.info("clients")["connected_clients"] < 20


async def test_150_concurrent_calls_wait_for_a_connection_instead_of_failing(bus: Bus) -> None:
    replies = await asyncio.gather(*(bus.execute(("ECHO", str(number))) for number in range(150)))
    assert replies == [[str(number).encode()] for number in range(150)]


async def test_a_cancelled_call_never_leaves_its_reply_to_the_next_one(redis_url: str) -> None:
    connection = connect(redis_url, timeout_s=1.0)
    for number in range(20):
        call = asyncio.create_task(connection.run([("BLPOP", f"empty-{number}", 5)], timeout_s=6, transaction=False))
        await asyncio.sleep(0.002 * (number % 4))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await connection.run([("ECHO", str(number))], timeout_s=1) == [str(number).encode()]
    await connection.close()


async def test_a_call_cut_off_by_its_timeout_never_leaves_its_reply_to_the_next_one(redis_url: str) -> None:
    connection = connect(redis_url, timeout_s=1.0)
    with pytest.raises(BusError, match=r"did not answer within 0\.05 s"):
        await connection.run([("XREAD", "BLOCK", 3000, "STREAMS", "s", "0")], timeout_s=0.05, transaction=False)
    assert await connection.run([("ECHO", "mine")], timeout_s=1) == [b"mine"]
    await connection.close()


@pytest.mark.alone
async def test_a_frozen_server_delays_no_sender_and_every_call_ends_in_time(
    own_server: RedisServer, own_bus: Bus, frozen: Any, until: Any, numbered: Numbered
) -> None:
    with frozen(own_server):
        started_s = time.monotonic()
        own_bus.send("stream", numbered(1))
        assert time.monotonic() - started_s < 0.1
        with pytest.raises(BusError):
            await own_bus.execute(("PING",))
        with pytest.raises(BusError, match="still queued"):
            await own_bus.flush()
        assert time.monotonic() - started_s < 3 * own_bus.timeout_s + 1.0
        await until(lambda: not own_bus.is_up)
        assert own_bus.up_since_s is None
    await until(lambda: own_bus.is_up)
    await delivered(own_bus)
    assert {m.attempt for entry in entries_of(own_bus.server, "stream") for m in entry} == {1}


async def test_a_frozen_and_thawed_server_is_the_same_one_but_the_connection_starts_anew(
    own_server: RedisServer, own_bus: Bus, frozen: Any, until: Any
) -> None:
    calls: list[str] = []
    own_bus.on_new_server(lambda: calls.append("new server"))
    first_id, first_s = own_bus.run_id, own_bus.up_since_s
    assert first_s is not None
    with frozen(own_server):
        await until(lambda: not own_bus.is_up)
    await until(lambda: own_bus.is_up)
    assert own_bus.run_id == first_id
    assert own_bus.up_since_s is not None
    assert own_bus.up_since_s > first_s
    assert calls == []


async def test_starting_without_a_server_is_no_error_and_heals(until: Any, numbered: Numbered) -> None:
    server = RedisServer()
    bus = Bus(server.url, "test", timeout_s=0.5)
    await bus.start()
    assert not bus.is_up
    bus.send("stream", numbered(1))
    with server:
        await until(lambda: bus.is_up)
        await delivered(bus)
        assert len(entries_of(bus.server, "stream")) == 1
        await bus.close()
    assert bus.num_reconnects == 0


async def test_a_full_queue_forgets_the_oldest_and_counts_them(numbered: Numbered) -> None:
    server = RedisServer()
    bus = Bus(server.url, "test", timeout_s=0.5, max_queued_messages=100)
    for number in range(250):
        bus.send("stream", numbered(number))
    assert bus.num_dropped_messages == 150
    with server:
        await bus.start()
        await delivered(bus)
        assert [m.attempt for entry in entries_of(bus.server, "stream") for m in entry] == list(range(150, 250))
        await bus.close()


async def test_a_stream_beyond_its_bound_is_full_until_it_is_read(
    redis_url: str, until: Any, listen: Any, numbered: Numbered
) -> None:
    bus = Bus(redis_url, "test", timeout_s=1.0, max_stream_entries=10)
    await bus.start()
    for number in range(15):
        bus.send("stream", numbered(number))
        await bus.flush()
        assert bus.is_stream_full("stream") == (number >= 10)
    assert not bus.is_stream_full("another")
    listener = listen(bus, "stream")
    await until(lambda: not bus.is_stream_full("stream"))
    assert listener.numbers == list(range(15))
    await bus.close()


async def test_a_server_out_of_memory_is_tried_until_it_has_room(
    own_server: RedisServer, own_bus: Bus, until: Any, numbered: Numbered
) -> None:
    await own_bus.execute(("CONFIG", "SET", "maxmemory", "1"))
    own_bus.send("stream", numbered(1))
    with pytest.raises(BusError):
        await own_bus.flush()
    assert entries_of(own_bus.server, "stream") == []
    await own_bus.execute(("CONFIG", "SET", "maxmemory", "0"))
    await delivered(own_bus)
    assert len(entries_of(own_bus.server, "stream")) == 1


@pytest.mark.parametrize(("policy", "warns"), [("allkeys-lru", True), ("volatile-ttl", True), ("noeviction", False)])
async def test_a_server_that_evicts_keys_is_warned_about(
    own_server: RedisServer, policy: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory-policy", policy)
    bus = Bus(own_server.url, "test", timeout_s=1.0)
    with caplog.at_level(logging.WARNING):
        await bus.start()
    await bus.close()
    assert ("set noeviction" in caplog.text) == warns


async def test_closing_sends_what_is_queued(redis_url: str, numbered: Numbered) -> None:
    bus = Bus(redis_url, "test", timeout_s=1.0)
    await bus.start()
    bus.send("stream", numbered(1))
    await bus.close()
    assert len(entries_of(redis_url, "stream")) == 1


async def test_20000_small_messages_take_at_most_a_second(bus: Bus) -> None:
    message = ResendTokens(request_id="r" * 16, choice=0, attempt=1, nonce="n" * 16, gateway_id="g", from_index=0)
    started_s = time.process_time()
    for number in range(20_000):
        bus.send("stream", message)
        if number % 64 == 0:
            await asyncio.sleep(0)
    await delivered(bus)
    # CPU time and not wall time: the cores are shared.
    assert time.process_time() - started_s < 1.0


async def test_neither_writer_nor_watch_ends_by_an_exception(
    bus: Bus, numbered: Numbered, until: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        for broken in ("_write", "execute"):
            patched.setattr(bus, broken, lambda *_, **__: 1 / 0)
        bus.send("stream", numbered(1))
        await until(lambda: "looking after the bus failed" in caplog.text and bus.num_refused_messages == 1)
        assert not bus.is_up
    bus.send("stream", numbered(2))
    await delivered(bus)
    await until(lambda: bus.is_up)
    assert [[m.attempt for m in entry] for entry in entries_of(bus.server, "stream")] == [[2]]
