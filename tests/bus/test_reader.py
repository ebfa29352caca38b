"""The reader: nothing lost between calls, nothing kept on the server, alive whatever happens to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.bus.bus import Bus
from pdserve.local.redis_server import RedisServer
from pdserve.messages import Cancel

Numbered = Callable[[int], Cancel]


async def length_of(bus: Bus, stream: str) -> int:
    (length,) = await bus.execute(("XLEN", stream))
    assert isinstance(length, int)
    return length


async def test_a_slow_reader_loses_nothing(bus: Bus, listen: Any, until: Any, numbered: Numbered) -> None:
    for number in range(3000):
        bus.send("stream", numbered(number))
        if number % 2 == 0:
            await asyncio.sleep(0)
    await bus.flush()
    listener = listen(bus, "stream")
    await until(lambda: len(listener.numbers) >= 3000)
    assert listener.numbers == list(range(3000))


async def test_an_evicted_stream_does_not_stop_the_reader(
    own_server: RedisServer, own_bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    listener = listen(own_bus, "stream")
    own_bus.send("stream", numbered(1))
    await until(lambda: listener.numbers == [1])
    await own_bus.execute(("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"), ("CONFIG", "SET", "maxmemory", "1"))
    await own_bus.execute(("CONFIG", "SET", "maxmemory", "0"), ("DEL", "stream"))
    own_bus.send("stream", numbered(2))
    await until(lambda: listener.numbers == [1, 2])


async def test_a_frozen_server_makes_the_reader_deaf_and_thawing_heals_it(
    own_server: RedisServer, own_bus: Bus, listen: Any, until: Any, frozen: Any, numbered: Numbered
) -> None:
    listener = listen(own_bus, "stream")
    await until(lambda: listener.reader.is_connected)
    before_s = listener.reader.disconnected_s
    with frozen(own_server):
        await until(lambda: not listener.reader.is_connected)
        await until(lambda: listener.reader.disconnected_s > before_s + 1.0)
    own_bus.send("stream", numbered(1))
    await until(lambda: 1 in listener.numbers)
    assert listener.reader.is_connected
    total_s = listener.reader.disconnected_s
    assert total_s > before_s + 1.0


@pytest.mark.alone
async def test_deaf_time_stands_still_while_connected_and_idle(bus: Bus, listen: Any, until: Any) -> None:
    listener = listen(bus, "stream")
    await until(lambda: listener.reader.is_connected)
    before_s = listener.reader.disconnected_s
    await asyncio.sleep(1.2)  # two blocking reads without an entry
    # Up to the pauses of a loaded machine.
    assert listener.reader.disconnected_s - before_s < 0.6


async def test_a_reader_holds_exactly_one_connection(
    own_server: RedisServer, own_bus: Bus, listen: Any, until: Any
) -> None:
    async def clients() -> int:
        (info,) = await own_bus.execute(("INFO", "clients"))
        return int(info["connected_clients"])

    before = await clients()
    readers = [listen(own_bus, f"stream-{number}") for number in range(10)]
    await until(lambda: all(listener.reader.is_connected for listener in readers))
    assert await clients() <= before + 10 + 1
