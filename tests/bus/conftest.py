"""A bus on a real server, and a server of one's own for tests that kill or freeze it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager

import pytest

from pdserve.bus.bus import Bus
from pdserve.bus.memory import MemoryServer
from pdserve.bus.reader import StreamReader
from pdserve.local.redis_server import RedisServer
from pdserve.messages import AnyMessage, Cancel

WaitUntil = Callable[[Callable[[], object]], AbstractAsyncContextManager[None]]


@pytest.fixture
def kind() -> str:
    """The server that the bus of a test is on, redis or memory; modules that hold for both override it."""
    return "redis"


@pytest.fixture
async def bus(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """A bus on an empty server."""
    bus = Bus(MemoryServer() if kind == "memory" else request.getfixturevalue("redis_url"), "test", timeout_s=1.0)
    await bus.start()
    yield bus
    await bus.close()


@pytest.fixture
def own_server(kind: str) -> Iterator[RedisServer | MemoryServer]:
    """A server that a test may stop and start again, empty."""
    if kind == "memory":
        yield MemoryServer()
        return
    with RedisServer() as server:
        yield server


@pytest.fixture
async def own_bus(own_server: RedisServer | MemoryServer) -> AsyncIterator[Bus]:
    bus = Bus(own_server if isinstance(own_server, MemoryServer) else own_server.url, "test", timeout_s=0.5)
    await bus.start()
    yield bus
    await bus.close()


@pytest.fixture
def frozen() -> Callable[[RedisServer], AbstractContextManager[None]]:
    """A context in which a server is stopped like a machine that hangs: connected, and silent."""

    @contextlib.contextmanager
    def freeze(server: RedisServer) -> Iterator[None]:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server.pid, signal.SIGCONT)

    return freeze


@pytest.fixture
def until() -> Callable[..., object]:
    """Waits for a condition; fails with its source when it does not come true."""

    async def wait(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
        give_up_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < give_up_s, f"not within {timeout_s} s"
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def numbered() -> Callable[[int], Cancel]:
    """A small message that carries a number."""
    return lambda number: Cancel(request_id="r", choice=0, attempt=number, nonce="n")


class Listener:
    """A running reader and what it heard."""

    def __init__(self, bus: Bus, stream: str) -> None:
        self.messages: list[AnyMessage] = []
        self.reader = StreamReader(bus, stream, self.messages.append)
        self.task = asyncio.create_task(self.reader.run())

    @property
    def numbers(self) -> list[int]:
        return [message.attempt for message in self.messages if isinstance(message, Cancel)]


@pytest.fixture
async def listen() -> AsyncIterator[Callable[[Bus, str], Listener]]:
    listeners: list[Listener] = []

    def start(bus: Bus, stream: str) -> Listener:
        listeners.append(Listener(bus, stream))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.task.cancel()
    await asyncio.gather(*(listener.task for listener in listeners), return_exceptions=True)
