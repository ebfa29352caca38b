"""The reader: nothing lost between calls, nothing kept on the server, alive whatever happens to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.bus.bus import Bus
from pdserve.bus.reader import TRIM_ENTRIES, StreamReader
from pdserve.errors import BusError
from pdserve.local.redis_server import RedisServer
from pdserve.messages import AnyMessage, Cancel, encode

Numbered = Callable[[int], Cancel]


async def length_of(bus: Bus, stream: str) -> int:
    (length,) = await bus.execute(("XLEN", stream))
    assert isinstance(length, int)
    return length


async def test_everything_written_while_the_reader_is_busy_is_read_in_order(
    bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    listener = listen(bus, "stream")
    for number in range(500):
        bus.send("stream", numbered(number))
        await asyncio.sleep(0)
    await until(lambda: len(listener.numbers) >= 500)
    assert listener.numbers == list(range(500))


async def test_what_was_written_before_the_reader_came_is_read(
    bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    bus.send("stream", numbered(7))
    await bus.flush()
    listener = listen(bus, "stream")
    await until(lambda: listener.numbers == [7])


async def test_what_is_processed_is_removed_and_the_stream_stays_bounded(
    bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    listener = listen(bus, "stream")
    longest = 0
    for number in range(1000):
        bus.send("stream", numbered(number))
        await bus.flush()
        if number % 50 == 0:
            await until(lambda number=number: len(listener.numbers) > number)
            longest = max(longest, await length_of(bus, "stream"))
    await until(lambda: len(listener.numbers) == 1000)
    assert longest <= TRIM_ENTRIES + 50
    while await length_of(bus, "stream"):  # each question is a round trip
        pass
    bus.send("stream", numbered(1000))
    await until(lambda: listener.numbers[-1] == 1000)


async def test_a_slow_reader_loses_nothing(bus: Bus, listen: Any, until: Any, numbered: Numbered) -> None:
    for number in range(3000):
        bus.send("stream", numbered(number))
        if number % 2 == 0:
            await asyncio.sleep(0)
    await bus.flush()
    listener = listen(bus, "stream")
    await until(lambda: len(listener.numbers) >= 3000)
    assert listener.numbers == list(range(3000))


async def test_a_handler_that_fails_is_logged_with_the_message_and_ends_nothing(
    bus: Bus, until: Any, numbered: Numbered, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def handle(message: AnyMessage) -> None:
        assert isinstance(message, Cancel)
        if message.attempt == 1:
            raise ValueError("bad day")
        heard.append(message.attempt)

    reader = StreamReader(bus, "stream", handle)
    task = asyncio.create_task(reader.run())
    for number in range(3):
        bus.send("stream", numbered(number))
    await until(lambda: len(heard) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert heard == [0, 2]
    assert reader.num_failed_messages == 1
    assert "Cancel r/0#1 failed" in caplog.text
    assert "bad day" in caplog.text


@pytest.mark.parametrize("field", [("m", b"\xc1garbage"), ("other", b"x"), ("m", encode([])[:0])])
async def test_an_entry_that_cannot_be_read_is_counted_and_skipped(
    bus: Bus, listen: Any, until: Any, numbered: Numbered, field: tuple[str, bytes]
) -> None:
    listener = listen(bus, "stream")
    await bus.execute(("XADD", "stream", "*", *field))
    bus.send("stream", numbered(1))
    await until(lambda: listener.numbers == [1])
    assert listener.reader.num_unreadable_entries == 1


async def test_a_restarted_empty_server_is_read_from_the_beginning(
    own_server: RedisServer, own_bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    listener = listen(own_bus, "stream")
    own_bus.send("stream", numbered(1))
    await until(lambda: listener.numbers == [1])
    own_server.stop()
    await until(lambda: not listener.reader.is_connected)
    own_server.start()
    # An id far below the reader's: time that ran backwards must not hide an entry.
    while True:
        try:
            await own_bus.execute(("XADD", "stream", "5-1", "m", encode([numbered(2)])))
            break
        except BusError:
            await asyncio.sleep(0.02)
    await until(lambda: 2 in listener.numbers)
    assert listener.numbers == [1, 2]
    assert listener.reader.is_connected


async def test_a_stream_lost_on_a_live_server_and_made_anew_with_lower_ids_is_read(
    bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    listener = listen(bus, "stream")
    bus.send("stream", numbered(1))
    await until(lambda: listener.numbers == [1])
    await bus.execute(("DEL", "stream"), ("XADD", "stream", "5-1", "m", encode([numbered(2)])))
    await until(lambda: listener.numbers == [1, 2])


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


async def test_the_reader_outlives_several_restarts(
    own_server: RedisServer, own_bus: Bus, listen: Any, until: Any, numbered: Numbered
) -> None:
    listener = listen(own_bus, "stream")
    for number in range(4):
        own_bus.send("stream", numbered(number))
        await until(lambda number=number: number in listener.numbers)
        own_server.stop()
        own_server.start()
    assert list(dict.fromkeys(listener.numbers)) == [0, 1, 2, 3]


async def test_a_cancelled_reader_ends_at_once_wherever_it_is(bus: Bus, numbered: Numbered) -> None:
    for number in range(20):
        task = asyncio.create_task(StreamReader(bus, "stream", lambda message: None).run())
        bus.send("stream", numbered(number))
        await asyncio.sleep(0.002 * (number % 5))
        task.cancel()
        async with asyncio.timeout(2):
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


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
