"""Writes an answer to the client, as one JSON body or as server-sent events. Step 8 of 8 of a request's way.

Before: generation/answer.py made text of tokens, and openai/reply.py events of it. After: the client.

The status line goes out with the first bytes and not before, so that whatever fails until then keeps its real
status. Every event has an `id`. Events that are ready together go out in one write. A client that does not
read for too long is given up. After a failure in mid-stream comes an `error` event and no `[DONE]`.

No empty line follows a comment: clients that remember an id, as OpenAI's does, would take it for an event without data.
Characters at which some clients cut lines are escaped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.gateway.http.error_body import Headers, error_object, error_response

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
_LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\u0085".encode(): b"\\u0085"}
"""Characters at which a reader of lines may cut → how else JSON writes them."""
_encode = msgspec.json.Encoder().encode


class SlowClientError(Exception):
    """The client did not read for longer than it may."""


class Responder:
    """The way back to one client."""

    def __init__(self, send: Send, *, request_id: str, headers: Headers, stall_timeout_s: float) -> None:
        """`headers`: sent with every kind of response."""
        self.status: int | None = None
        """Sent status; None before."""
        self.is_closed = False
        self._send, self._request_id, self._headers = send, request_id.encode(), headers
        self._stall_timeout_s = stall_timeout_s
        self._num_events = 0

    # --- in one piece

    async def json(self, body: Any, *, status: int = 200, headers: Headers | None = None) -> None:
        """A whole response; `body` is encoded unless it is bytes."""
        data = body if isinstance(body, bytes) else _encode(body)
        length = [(b"content-length", str(len(data)).encode())]
        await self._start(status, [*(headers or _JSON_HEADERS), *length])
        await self._write(data, is_last=True)

    async def fail(self, error: RequestError) -> None:
        """The error's status and body, or an error event when the stream has begun. Ends the response."""
        if self.is_closed:
            return
        if self.status is None:
            status, headers, body = error_response(error)
            await self.json(body, status=status, headers=headers)
            return
        await self._write(self._lines_of([error_object(error)]), is_last=True)

    # --- as events

    async def events(self, events: Sequence[Any]) -> None:
        """Write these events at once; the first time the response begins."""
        if self.status is None:
            await self._start(200, _STREAM_HEADERS)
        await self._write(self._lines_of(events))

    async def keep_alive(self) -> None:
        """A comment, which clients ignore and proxies take for traffic."""
        if self.status is None:
            await self._start(200, _STREAM_HEADERS)
        await self._write(b": keep-alive\n")

    async def done(self, events: Sequence[Any] = ()) -> None:
        """The last events and the real end."""
        if self.status is None:
            await self._start(200, _STREAM_HEADERS)
        lines = self._lines_of(events) + self._line_of(b"[DONE]")
        await self._write(lines, is_last=True)

    def _lines_of(self, events: Sequence[Any]) -> bytes:
        return b"".join([self._line_of(_encode(event)) for event in events])

    def _line_of(self, data: bytes) -> bytes:
        if b"\xe2\x80" in data or b"\xc2\x85" in data:
            for character, escaped in _LINE_ENDS.items():
                data = data.replace(character, escaped)
        line = b"id: %s:%d\ndata: %s\n\n" % (self._request_id, self._num_events, data)
        self._num_events += 1
        return line

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._bounded({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        self.is_closed = is_last
        await self._bounded({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _bounded(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.is_closed = True
            raise SlowClientError from None
