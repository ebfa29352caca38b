"""Reads a request's body under a limit and makes JSON of it, strictly.

The limit holds for the bytes that arrive, whatever Content-Length says or does not say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.error_body import http_error
from pdserve.gateway.http.fields import Fields

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

LINGER_S = 2.0
"""For so long a body that is too large is read and forgotten, so that its sender gets to read the answer."""


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_fields(headers: Mapping[bytes, bytes], receive: Receive, *, max_bytes: int, timeout_s: float) -> Fields:
    """The body's JSON object.

    Raises:
        RequestError: 400 not JSON, 408 too slow, 413 too large, 415 not declared as JSON.
        ClientGoneError: the client left.
    """
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise http_error(415, "Content-Type must be application/json.")
    try:
        async with asyncio.timeout(timeout_s):
            return Fields.of(parse_json(await _read(headers, receive, max_bytes)))
    except TimeoutError:
        raise http_error(408, f"The body did not arrive within {timeout_s:g} s.") from None


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no Infinity, no number beyond floats, no lone surrogates, no bottomless nesting.

    Raises:
        InvalidRequestError: it is not that.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("The request body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        reason = str(error).split(" - at ")[0]
        raise InvalidRequestError(f"The request body is not valid JSON: {reason}", code="invalid_json") from None


async def _read(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    declared = headers.get(b"content-length", b"0")
    is_too_large = declared.isdigit() and int(declared) > max_bytes
    pieces: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more and not is_too_large:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        num_bytes += len(piece)
        is_too_large = num_bytes > max_bytes
        pieces.append(piece)
        has_more = message.get("more_body", False)
    if is_too_large:
        pieces.clear()
        await _discard(receive, has_more)
        raise http_error(413, f"The request body is larger than {max_bytes} bytes.", code="body_too_large")
    return b"".join(pieces)


async def _discard(receive: Receive, has_more: bool) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while has_more:
                message = await receive()
                has_more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        pass
