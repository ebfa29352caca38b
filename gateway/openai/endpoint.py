"""The edge around every POST: body in, errors out, and an ear for the client that leaves.

Step 1 of 8 of a request's way, with chat.py and completions.py.

The handler races against `http.disconnect`: polling would miss it behind middleware. Whatever a handler raises
becomes one error in one shape; what it does not expect is logged and becomes a 500.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RequestError
from pdserve.gateway.dispatch.admission import shutdown_error
from pdserve.gateway.http.body import ClientGoneError, Fields, Receive, read_fields
from pdserve.gateway.http.error_body import http_error, internal_error
from pdserve.gateway.http.sse import Responder, Send, SlowClientError
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.http_protocol import ABORT
from pdserve.ids import RequestId
from pdserve.log import get_logger
from pdserve.reasons import Ending

_log = get_logger(__name__)

Handler = Callable[[Frontend, Call, Fields], Coroutine[Any, Any, None]]
_CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
CLIENT_LEFT = 499


@dataclass(frozen=True)
class PostEndpoint:
    """An ASGI app for one POST route."""

    frontend: Frontend
    handler: Handler
    id_prefix: str = "req"
    is_generation: bool = False
    """Asks workers for tokens: refused while draining, counted as a request."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request from its body to the end of its answer."""
        frontend = self.frontend
        headers = dict(scope["headers"])
        if b"content-encoding" in headers:  # several lines are one list
            lines = [value for name, value in scope["headers"] if name == b"content-encoding"]
            headers[b"content-encoding"] = b",".join(lines)
        call = self._call(headers, send)
        abort = scope.get("extensions", {}).get(ABORT, _nothing)
        if not self.is_generation:
            await self._serve(call, headers, receive, abort)
            return
        frontend.num_active += 1
        try:
            await self._serve(call, headers, receive, abort)
        finally:
            frontend.num_active -= 1
            frontend.has_ended.set()
            call.record.duration_s = frontend.clock() - call.received_s
            frontend.observer.ended(call.record)

    async def _serve(
        self, call: Call, headers: Mapping[bytes, bytes], receive: Receive, abort: Callable[[], None]
    ) -> None:
        record, responder = call.record, call.responder
        try:
            await self._answer(call, headers, receive)
            record.code = responder.status or CLIENT_LEFT
        except (ClientGoneError, SlowClientError) as error:
            record.code, record.ending = responder.status or CLIENT_LEFT, Ending.CANCELLED
            if isinstance(error, SlowClientError):
                _log.info("request %s: the client does not read, its connection is closed", call.request_id)
                abort()
                await asyncio.sleep(0)  # the server notices before this returns
        except RequestError as error:
            await self._fail(call, error)
        except Exception:
            _log.exception("request %s failed unexpectedly", call.request_id)
            await self._fail(call, internal_error())

    async def _answer(self, call: Call, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        limits = self.frontend.limits
        if self.is_generation and self.frontend.is_draining:
            raise shutdown_error()
        fields = await read_fields(headers, receive, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
        call.model = self._model(fields)
        await _until_client_leaves(receive, self.handler(self.frontend, call, fields), call.responder)

    def _model(self, fields: Fields) -> str:
        """The name that the request uses for this model; the first if it names none."""
        card = self.frontend.card
        name = fields.text("model", card.served_name)
        if name not in card.served_names:
            error = http_error(404, f"The model {name[:80]!r} does not exist here.", code="model_not_found")
            error.param = "model"
            raise error
        return name

    async def _fail(self, call: Call, error: RequestError) -> None:
        call.record.code, call.record.ending = call.responder.status or error.status, Ending.ERROR
        try:
            await call.responder.fail(error)
        except SlowClientError:
            _log.debug("request %s: the client did not read its error", call.request_id)

    def _call(self, headers: Mapping[bytes, bytes], send: Send) -> Call:
        frontend = self.frontend
        request_id = RequestId(f"{self.id_prefix}-{secrets.token_hex(16)}")
        pins = [
            headers.get(name) if frontend.has_pins else None for name in (b"x-pdserve-prefill", b"x-pdserve-decode")
        ]
        return Call(
            request_id=request_id,
            model=frontend.card.served_name,
            received_s=frontend.clock(),
            has_timing=headers.get(b"x-pdserve-timing") == b"1",
            pinned_prefill=pins[0].decode("latin-1") if pins[0] else None,
            pinned_decode=pins[1].decode("latin-1") if pins[1] else None,
            responder=Responder(
                send,
                request_id=request_id,
                headers=[(b"x-request-id", _shown_request_id(headers, request_id))],
                stall_timeout_s=frontend.limits.client_stall_timeout_s,
            ),
        )


def _shown_request_id(headers: Mapping[bytes, bytes], own: str) -> bytes:
    """The client's id when it is short and plain, else our own; it never goes into events."""
    given = headers.get(b"x-request-id", b"")
    return given if _CLIENT_REQUEST_ID.fullmatch(given) else own.encode()


async def _until_client_leaves(receive: Receive, work: Coroutine[Any, Any, None], responder: Responder) -> None:
    """Run `work` to its end, or cancel it when the client closes the connection before it is answered.

    Raises:
        ClientGoneError: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not responder.is_closed:
            raise ClientGoneError
        await working
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _nothing() -> None:
    """Stands in where the server cannot abort a connection."""


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
