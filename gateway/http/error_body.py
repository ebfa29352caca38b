"""Every error that a client sees has one form: `{"error": {"message", "type", "param", "code"}}`. Pure."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import msgspec

from pdserve.errors import RequestError

Headers = list[tuple[bytes, bytes]]

_MORE_HEADERS: dict[str | None, Headers] = {"unsupported_encoding": [(b"accept-encoding", b"gzip, deflate")]}
"""Code of an error → headers that go with it."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: RequestError) -> dict[str, Any]:
    """The object of one error."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> tuple[int, Headers, bytes]:
    """(status, headers, body) of the response with this error."""
    headers: Headers = [(b"content-type", b"application/json"), *_MORE_HEADERS.get(error.code, [])]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return error.status, headers, msgspec.json.encode(error_object(error))


def http_error(status: int, message: str | None = None, *, code: str | None = None) -> RequestError:
    """An error that HTTP itself defines, such as 404 and 405."""
    phrase = HTTPStatus(status).phrase
    error = RequestError(message or phrase, status=status, code=code or phrase.lower().replace(" ", "_"))
    error.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return error


def internal_error() -> RequestError:
    """Something unexpected happened; the log knows what."""
    return http_error(500, "Internal error; the gateway's log says more.", code="internal_error")
