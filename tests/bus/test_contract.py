"""What holds on every server, a Redis and the one in memory: order, packing, outages, readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.bus.bus import Bus
from pdserve.bus.reader import TRIM_ENTRIES, StreamReader
from pdserve.errors import BusError
from pdserve.messages import AnyMessage, Cancel, KvRelease, decode, encode

Numbered = Callable[[int], Cancel]


@pytest.fixture(params=["redis", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    """The server that the bus of a test is on."""
    return str(request.param)


async def entries_of(bus: Bus, stream: str) -> list[list[Any]]:
    (entries,) = await bus.execute(("XRANGE", stream, "-", "+"))
    return [decode(fields[b"m"]) for _, fields in entries]


async def delivered(bus: Bus) -> None:
    """Flush as often as a loaded machine needs; the test's own timeout is the limit."""
    while True:
        with contextlib.suppress(BusError):
            return await bus.flush()


async def length_of(bus: Bus, stream: str) -> int:
    (length,) = await bus.execute(("XLEN", stream))
    assert isinstance(length, int)
    return length


# --- the writer and the watch over the server


async def test_what_is_sent_together_is_one_entry_per_stream_in_order(bus: Bus, numbered: Numbered) -> None:
    for number in range(6):
        bus.send(f"stream-{number % 2}", numbered(number))
    await bus.flush()
    assert [[m.attempt for m in entry] for entry in await entries_of(bus, "stream-0")] == [[0, 2, 4]]
    assert [[m.attempt for m in entry] for entry in await entries_of(bus, "stream-1")] == [[1, 3, 5]]


async def test_a_refused_command_is_a_bus_error_that_names_it(bus: Bus) -> None:
    with pytest.raises(BusError, match="refused 'LPUSH'"):
        await bus.execute(("SET", "text", "x"), ("LPUSH", "text", "y"))


async def test_messages_sent_while_the_server_is_dead_arrive_in_order_once_it_is_back(
    own_server: Any, own_bus: Bus, until: Any, numbered: Numbered
) -> None:
    own_server.stop()
    for number in range(1000):
        own_bus.send("stream", numbered(number))
    await until(lambda: not own_bus.is_up)
    own_server.start()
    await until(lambda: own_bus.is_up)
    await delivered(own_bus)
    numbers = [m.attempt for entry in await entries_of(own_bus, "stream") for m in entry]
    assert sorted(set(numbers)) == list(range(1000))
    assert list(dict.fromkeys(numbers)) == list(range(1000))


async def test_a_restarted_server_is_noticed_as_another_one(own_server: Any, own_bus: Bus, until: Any) -> None:
    calls: list[str] = []
    own_bus.on_new_server(lambda: calls.append("new server"))
    first_id, first_s = own_bus.run_id, own_bus.up_since_s
    assert first_s is not None
    own_server.stop()
    own_server.start()
    await until(lambda: own_bus.run_id != first_id)
    assert own_bus.up_since_s is not None
    assert own_bus.up_since_s > first_s
    assert calls == ["new server"]
    assert own_bus.num_reconnects == 1


async def test_a_callback_that_fails_keeps_no_other_from_being_called(
    own_server: Any, own_bus: Bus, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    own_bus.on_new_server(lambda: calls.append(1 // 0))
    own_bus.on_new_server(lambda: calls.append(2))
    own_server.stop()
    own_server.start()
    await until(lambda: calls)
    assert calls == [2]
    assert "programming error" in caplog.text


async def test_a_key_of_another_type_does_not_hold_up_other_streams(bus: Bus, numbered: Numbered) -> None:
    await bus.execute(("SET", "text", "x"))
    bus.send("text", numbered(1))
    bus.send("stream", numbered(2))
    await bus.flush()
    assert len(await entries_of(bus, "stream")) == 1
    assert bus.num_refused_messages == 1


async def test_a_message_that_cannot_be_packed_does_not_take_others_with_it(bus: Bus, numbered: Numbered) -> None:
    bad = KvRelease(request_id="r", choice=0, attempt=0, nonce="n", worker_id=object(), generation="g")  # type: ignore[arg-type]
    bus.send("stream", numbered(1))
    bus.send("stream", bad)
    bus.send("stream", numbered(2))
    await bus.flush()
    assert [m.attempt for entry in await entries_of(bus, "stream") for m in entry] == [1, 2]
    assert bus.num_refused_messages == 1


async def test_the_servers_clock_is_known(bus: Bus) -> None:
    ((seconds, microseconds),) = await bus.execute(("TIME",))
    assert bus.server_time_s() == pytest.approx(seconds + microseconds / 1e6, abs=1.0)


# --- readers


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
    assert "Cancel r/0#1 failed" in caplog.text
    assert "bad day" in caplog.text


@pytest.mark.parametrize("field", [("m", b"\xc1garbage"), ("other", b"x"), ("m", encode([])[:0])])
async def test_an_entry_that_cannot_be_read_is_logged_and_skipped(
    bus: Bus, listen: Any, until: Any, numbered: Numbered, field: tuple[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(bus, "stream")
    await bus.execute(("XADD", "stream", "*", *field))
    bus.send("stream", numbered(1))
    await until(lambda: listener.numbers == [1])
    assert caplog.text.count("an entry of stream is skipped") == 1


async def test_a_restarted_empty_server_is_read_from_the_beginning(
    own_server: Any, own_bus: Bus, listen: Any, until: Any, numbered: Numbered
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


async def test_the_reader_outlives_several_restarts(
    own_server: Any, own_bus: Bus, listen: Any, until: Any, numbered: Numbered
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
