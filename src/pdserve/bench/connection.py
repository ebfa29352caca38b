"""A streaming HTTP/1.1 client that is never the bottleneck: asyncio protocol + httptools (C parser).

Written because a general client costs 150-300 µs per streamed chunk, which at 64 streams on a shared
machine is what would be measured. Every piece of a body is handed over together with the time at which
its packet was read. Keeps connections alive; no redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from pdserve.errors import SettingError

OnBody = Callable[[bytes, float], None]
"""Called with a piece of the body and the time (`time.perf_counter()`) at which it arrived."""


class ConnectionLostError(ConnectionError):
    """The server closed the connection before the response was complete."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a base URL points."""

    host: str
    port: int
    is_tls: bool
    path: str
    """Prefix of every path, without a trailing slash."""

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse a base URL such as http://127.0.0.1:8000 or https://host/prefix."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError("--url", url, "an http(s) URL such as http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))


class _Protocol(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._now_s = 0.0
        self.has_response_begun = False
        self.is_reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def request(self, payload: bytes, on_body: OnBody) -> asyncio.Future[int]:
        """Send one request; the future's result is the status, once the whole body has arrived."""
        assert self._transport is not None, "request before connection_made"
        assert self._done is None or self._done.done(), "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self.has_response_begun = False
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._done.set_exception(ConnectionLostError("the connection was closed by the server"))
        else:
            self._transport.write(payload)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._parser is None:
            return
        self.has_response_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLostError(f"unreadable HTTP response: {error}"))
            self.close()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body from the parser."""
        if self._on_body is not None:
            self._on_body(body, self._now_s)

    def on_message_complete(self) -> None:
        """Note the end of the response, which the parser has found."""
        assert self._parser is not None
        self.is_reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._fail(ConnectionLostError("the server closed the connection in the middle of the response"))

    def close(self) -> None:
        """Drop the connection at once: how a client that goes away looks to the server."""
        self.is_reusable = False
        self._on_body = None
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class ConnectionPool:
    """Keep-alive connections to one server; as many as there are requests in flight."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.address = Address.of(url)
        self._idle: list[_Protocol] = []
        lines = {"Host": f"{self.address.host}:{self.address.port}", "Accept": "*/*", **headers}
        assert not any("\n" in f"{name}{value}" for name, value in lines.items()), list(lines)
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """POST a JSON body, hand over the response body as it arrives; returns the status.

        Cancelling the task closes the connection. A kept-alive connection that the server had closed
        in the meantime is replaced once, before anything of a response was seen.

        Raises:
            OSError: no connection; ConnectionLostError: it ended before the response did.
        """
        head = f"POST {self.address.path}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
        payload = f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_reusable:
                continue
            try:
                return await self._exchange(connection, payload, on_body)
            except ConnectionLostError:
                if connection.has_response_begun:
                    raise
        return await self._exchange(await self._connect(), payload, on_body)

    async def open_idle(self, num_connections: int) -> None:
        """Have this many connections ready, so that no measured request pays for a TCP handshake."""
        self._idle += await asyncio.gather(*(self._connect() for _ in range(num_connections - len(self._idle))))

    async def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # lets the loop run connection_lost

    async def _exchange(self, connection: _Protocol, payload: bytes, on_body: OnBody) -> int:
        try:
            status = await connection.request(payload, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    async def _connect(self) -> _Protocol:
        loop = asyncio.get_running_loop()
        address = self.address
        _, protocol = await loop.create_connection(_Protocol, address.host, address.port, ssl=address.is_tls or None)
        return protocol
