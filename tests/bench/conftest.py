"""A fake OpenAI-compatible server with scripted delays, in a thread and event loop of its own.

It notes when it wrote each event, on the clock that the client uses too: the truth that measurements are
compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Event:
    """Wait, then write."""

    delay_s: float
    payload: dict[str, Any] | str
    """A dict becomes a data event, a string is written as it is; `CLOSE` ends the connection."""


CLOSE = "CLOSE"
DONE = "data: [DONE]\n\n"


def token_events(
    delays_s: list[float], tokens: list[list[int]], *, usage: bool = True, ids: bool = True, num_prompt: int = 7
) -> list[Event]:
    """Events of a completion: one per entry of `tokens`, then finish, usage and [DONE]."""
    events = [
        Event(d, {"choices": [{"index": 0, "text": "x" * len(t), **({"token_ids": t} if ids else {})}]})
        for d, t in zip(delays_s, tokens, strict=True)
    ]
    events.append(Event(0, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    if usage:
        counts = {"prompt_tokens": num_prompt, "completion_tokens": sum(map(len, tokens))}
        events.append(Event(0, {"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": 3}}}))
    return [*events, Event(0, DONE)]


@dataclass
class FakeServer:
    """Answers every POST with the events that `script(path, body)` returns."""

    script: Callable[[str, dict[str, Any]], list[Event] | tuple[int, dict[str, Any]]]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    writes_s: list[list[float]] = field(default_factory=list)
    """Per request in order of arrival: when each event was written."""
    received_s: list[float] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    num_connections: int = 0
    num_disconnects_in_stream: int = 0
    url: str = ""
    token_count: Callable[[str], int] | None = len

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if path == "/v1/models":
            return await self._json(writer, 200, {"data": [{"id": "fake", "dtype": "float32"}]})
        if path == "/tokenize" and self.token_count is not None:
            text = body.get("prompt") or body["messages"][0]["content"]
            return await self._json(writer, 200, {"tokens": [ord(c) for c in text], "count": self.token_count(text)})
        if method == "GET" or path == "/tokenize":
            return await self._json(writer, 404, {"error": {"message": "no"}})
        return await self._stream(path, body, reader, writer)

    async def _stream(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.bodies.append(body)
        self.received_s.append(time.perf_counter())
        times: list[float] = []
        self.writes_s.append(times)
        answer = self.script(path, body)
        if isinstance(answer, tuple):
            return await self._json(writer, *answer)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in answer:
            if event.delay_s:
                await asyncio.sleep(event.delay_s)
            if reader.at_eof():
                self.num_disconnects_in_stream += 1
                return False
            if event.payload == CLOSE:
                return False
            text = event.payload if isinstance(event.payload, str) else f"data: {json.dumps(event.payload)}\n\n"
            times.append(time.perf_counter())
            writer.write(b"%x\r\n%s\r\n" % (len(text.encode()), text.encode()))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _json(self, writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> bool:
        body = json.dumps(answer).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % status)
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        return True


@contextlib.contextmanager
def _running(server: FakeServer) -> Iterator[FakeServer]:
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        listener.close()
        for writer in server.writers:
            writer.transport.abort()
        handlers = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*handlers, return_exceptions=True)

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()


StartFake = Callable[..., FakeServer]


@pytest.fixture
def fake_server() -> Iterator[StartFake]:
    """Call it with a script; the server runs until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda script, **more: stack.enter_context(_running(FakeServer(script, **more)))


@pytest.fixture
def tokens() -> Callable[..., list[Event]]:
    """`token_events`, for tests that cannot import this module."""
    return token_events


@pytest.fixture
def event() -> type[Event]:
    """`Event`, for tests that cannot import this module."""
    return Event
