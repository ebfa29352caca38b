"""Test hooks on the way out: the named messages are lost, doubled, late or overtaken; no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.bus.bus import Bus
from pdserve.faults import Faults
from pdserve.messages import Cancel, Finished


@pytest.fixture
async def tampered(redis_url: str) -> AsyncIterator[tuple[Bus, Faults]]:
    faults = Faults()
    bus = Bus(redis_url, "test", timeout_s=1.0, faults=faults)
    await bus.start()
    yield bus, faults
    await bus.close()


def finished(number: int) -> Finished:
    return Finished(
        request_id="r", choice=0, attempt=number, nonce="n",
        worker_id="w", generation="g", finish_reason="stop", num_output_tokens=1,
    )  # fmt: skip


def heard(listener: Any) -> list[tuple[str, int]]:
    return [(type(message).__name__, message.attempt) for message in listener.messages]


CASES = [
    ({}, [("Cancel", 1), ("Finished", 1), ("Cancel", 2), ("Finished", 2)]),
    ({"drop": {"message": "Cancel", "times": 1}}, [("Finished", 1), ("Cancel", 2), ("Finished", 2)]),
    (
        {"duplicate": {"message": "Finished", "times": 1}},
        [("Cancel", 1), ("Finished", 1), ("Finished", 1), ("Cancel", 2), ("Finished", 2)],
    ),
    (
        {"reorder": {"message": "Cancel", "times": 1}},
        [("Finished", 1), ("Cancel", 1), ("Cancel", 2), ("Finished", 2)],
    ),
    (
        {"delay": {"message": "Cancel", "times": 1, "s": 0.1}},
        [("Finished", 1), ("Cancel", 2), ("Finished", 2), ("Cancel", 1)],
    ),
]


@pytest.mark.parametrize(("obj", "expected"), CASES, ids=lambda value: next(iter(value), "none"))
async def test_a_fault_touches_only_the_messages_it_names(
    tampered: tuple[Bus, Faults], listen: Any, until: Any, obj: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    bus, faults = tampered
    faults.put(obj)
    listener = listen(bus, "stream")
    for number in (1, 2):
        bus.send("stream", Cancel(request_id="r", choice=0, attempt=number, nonce="n"))
        bus.send("stream", finished(number))
    await until(lambda: len(listener.messages) >= len(expected))
    assert heard(listener) == expected


async def test_a_message_to_be_overtaken_is_sent_even_when_none_follows(
    tampered: tuple[Bus, Faults], listen: Any, until: Any
) -> None:
    bus, faults = tampered
    faults.put({"reorder": {"message": "Finished", "times": 1}})
    listener = listen(bus, "stream")
    bus.send("stream", finished(1))
    bus.send("another", finished(2))
    await until(lambda: listener.messages)
    assert heard(listener) == [("Finished", 1)]


async def test_faults_changed_later_take_effect_at_once(tampered: tuple[Bus, Faults], listen: Any, until: Any) -> None:
    bus, faults = tampered
    listener = listen(bus, "stream")
    faults.put({"drop": {"message": "Finished"}})
    bus.send("stream", finished(1))
    faults.put({})
    bus.send("stream", finished(2))
    await until(lambda: listener.messages)
    await asyncio.sleep(0)
    assert heard(listener) == [("Finished", 2)]
