"""One HTTP connection as clients really speak: uvicorn's protocol with limits, ignored upgrades, HTTP/1.0, JSON errors.

An offered upgrade (HTTP/2 over plain text, WebSocket, TLS) is ignored, as RFC 9110 (7.8) allows. The parser beneath
drops the body of such a request, so it gets the head once more without the offer.

HTTP/1.0 knows no chunks: a body whose length is not known ends with the connection.

What is no HTTP at all is answered before any application sees it, in the shape that all errors have. An answer
that is due on that connection is sent first, whole.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

ABORT = "pdserve.abort"
"""Scope extension: closes the connection at once and forgets what it has not written."""
MAX_HEAD_BYTES = 64 * 1024
"""Path and headers of one request."""
LINGER_S = 2.0
"""After a refusal: what still arrives is dropped for so long, since closing at once would take the answer along."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection may take."""

    stream_buffer_bytes: int = 1 << 20
    """Kept of what the client has not read; beyond that writing waits."""
    stall_timeout_s: float = 30.0
    """The kernel closes a connection whose peer has vanished in this time."""
    idle_timeout_s: float = 75.0
    """A connection without a request is closed after this time, and so is one whose head takes longer."""


class RefusedHeadError(Exception):
    """A request's head that is answered without the application."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message
        super().__init__(message)


def protocol_with(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The protocol with this process's limits on every connection."""

    class LimitedProtocol(ClientProtocol):
        _limits = limits

    return LimitedProtocol


class ClientProtocol(HttpToolsProtocol):
    """One connection from a client, with its limits."""

    _limits = ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the connection's limits; its first request has as long to come as later ones."""
        super().connection_made(transport)
        self.url = b""
        self._is_in_head, self._is_in_request, self._is_new_head = True, False, False
        self._num_head_bytes, self._num_arriving_bytes = 0, 0
        self._is_refused = False
        transport.set_write_buffer_limits(high=self._limits.stream_buffer_bytes)
        sock = cast("socket.socket | None", transport.get_extra_info("socket"))
        option: Any = getattr(socket, "TCP_USER_TIMEOUT", None)
        if sock is not None and option is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, option, int(1000 * self._limits.stall_timeout_s))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Parse what came, once more without its offer where an upgrade is offered."""
        self._is_new_head = False
        while data and not self._is_refused:
            self._num_arriving_bytes = len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError as error:
                self._refuse(_refusal(error))
            else:
                break
        if self._is_in_head and not self._is_new_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self._is_refused:
                self._refuse(self._too_large())

    # --- what the parser finds

    def on_message_begin(self) -> None:
        """A head begins: it has to be complete in time."""
        self._is_in_head, self._is_in_request, self._is_new_head = True, True, True
        self._num_head_bytes = 0
        self._wait_for_head()
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: self.transport.abort}

    def on_headers_complete(self) -> None:
        """Start the application, unless the head comes once more without its offer of an upgrade."""
        if self.parser.get_method() == b"CONNECT":
            raise RefusedHeadError(405, "method_not_allowed", "This is no proxy: CONNECT is not served.")
        if self._num_head_bytes + self._num_arriving_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
            raise self._too_large()
        if self.parser.should_upgrade():
            return
        if self.url[:1] not in (b"/", b"*"):
            self.url = _without_host(self.url)
        super().on_headers_complete()
        self.headers = []  # trailers behind a body are no headers
        self._is_in_head = False
        self._unset_keepalive_if_required()
        if self.scope["http_version"] == "1.0":
            self.cycle.keep_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """The next bytes are another head."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._is_in_head, self._is_in_request, self._is_new_head = True, False, True

    def on_response_complete(self) -> None:
        """Close where the client waits to be asked for a body: it has its answer, and what it sends next is unclear."""
        super().on_response_complete()
        if self.expect_100_continue and not self._is_in_head:
            self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
            app = _without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _head_without_upgrade(self) -> bytes:
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version), *_lines(kept)]
        return b"\r\n".join([*lines, b"", b""])

    def _head_size(self) -> int:
        return len(self.url) + sum(len(line) + 2 for line in _lines(self.headers))

    def _too_large(self) -> RefusedHeadError:
        if len(self.url) > MAX_HEAD_BYTES // 2:
            return RefusedHeadError(414, "url_too_long", f"The request's head has at most {MAX_HEAD_BYTES} bytes.")
        return RefusedHeadError(431, "head_too_large", f"The request's head has at most {MAX_HEAD_BYTES} bytes.")

    # --- time

    def _wait_for_head(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came in time: close, and say so where a head has begun."""
        if self._is_in_head and self._is_in_request and not self._is_refused:
            self._refuse(RefusedHeadError(408, "request_timeout", "The request's head did not arrive in time."))
        else:
            super().timeout_keep_alive_handler()

    # --- refusals

    def _refuse(self, refusal: RefusedHeadError) -> None:
        """Answer what is no HTTP, and end the connection; an answer that is due comes first and is the last one."""
        cycle: Any = self.cycle
        self._is_refused = True
        is_begun = cycle is not None and (self._is_in_head or cycle.response_started)
        if is_begun and not cycle.response_complete:
            cycle.keep_alive = False
            return
        if self._is_in_head or not is_begun:
            body = _error_body(refusal)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            head = STATUS_LINE[refusal.status] + b"\r\n".join([*_lines(headers), b"", b""])
            self.transport.write(head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.transport.close)


def _without_chunks(cycle: Any, app: Any) -> Any:
    """The application for a client of HTTP/1.0; the connection stays only where the body's length is told."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        is_open_ended = False

        async def send_plainly(message: MutableMapping[str, Any]) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                is_open_ended = all(name.lower() != b"content-length" for name, _ in headers)
                if is_open_ended:
                    cycle.chunked_encoding, cycle.keep_alive = False, False
                elif cycle.keep_alive:
                    message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
            elif is_open_ended:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer


def _without_host(url: bytes) -> bytes:
    """Path and query of a URL as proxies get it, `http://host/path`."""
    parsed = httptools.parse_url(url)
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")


def _refusal(error: httptools.HttpParserError) -> RefusedHeadError:
    """What to answer after the parser has given up."""
    cause = error.__context__
    if isinstance(cause, RefusedHeadError):
        return cause
    if isinstance(cause, httptools.HttpParserInvalidURLError):
        return RefusedHeadError(400, "bad_request", "The request's URL is not valid.")
    reason = str(error).rstrip(".")
    if "PRI" in reason:
        reason = "HTTP/2 needs TLS in front of this server; speak HTTP/1.1"
    return RefusedHeadError(400, "bad_request", f"The request is not valid HTTP: {reason}.")


def _error_body(refusal: RefusedHeadError) -> bytes:
    error = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": refusal.code}
    return json.dumps({"error": error}).encode()


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    return [b"%s: %s" % header for header in headers]
