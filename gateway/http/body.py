"""A request's body: read under a limit, parsed strictly, and its fields with their types and ranges.

The limit holds for the bytes that arrive, whatever Content-Length says or does not say, and for what encodings.py
unpacks of them. A field of a wrong type or
range is a 400 that names it; null counts as absent; booleans are no numbers; nothing is converted silently. Fields
that no API of this kind has are ignored; the others are in `gateway/openai/request_fields.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import msgspec

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.encodings import as_utf8, charset_of, codings_of
from pdserve.gateway.http.error_body import http_error

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

LINGER_S = 2.0
"""Time in which a body that is too large is still read and forgotten, so that its sender gets to read the answer."""
_JSON = b"application/json"
INT64 = range(-(2**63), 2**63)


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_fields(headers: Mapping[bytes, bytes], receive: Receive, *, max_bytes: int, timeout_s: float) -> Fields:
    """The body's JSON object.

    Raises:
        RequestError: 400 not JSON, 408 too slow, 413 too large, 415 declared as what is not read.
        ClientGoneError: the client left.
    """
    kind = headers.get(b"content-type", _JSON)
    if kind != _JSON and not (media := kind.split(b";")[0].strip().lower()).endswith(b"+json") and media != _JSON:
        raise http_error(415, "Content-Type must be application/json.")
    charset = None if kind == _JSON else charset_of(kind)
    codings = codings_of(headers[b"content-encoding"]) if b"content-encoding" in headers else []
    transfer = headers.get(b"transfer-encoding", b"chunked").decode("latin-1")
    if transfer.strip().lower() != "chunked":
        raise http_error(501, f"Transfer-Encoding {transfer[:40]!r} is not read; send chunked alone.")
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(headers, receive, max_bytes)
    except TimeoutError:
        raise http_error(408, f"The body did not arrive within {timeout_s:g} s.") from None
    if codings or charset or not data[:4].isascii() or b"\0" in data[:4]:
        data = await asyncio.to_thread(as_utf8, data, codings, charset, max_bytes)
    return Fields.of(parse_json(data))


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
        if num_bytes or headers.get(b"expect", b"").lower() != b"100-continue":  # else the client waits to be asked
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


def is_integer(value: object) -> bool:
    """Whether a JSON value is a whole number: True is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Fields:
    """One JSON object; `path` is where it stands in the body, for `param`."""

    values: Mapping[str, Any]
    path: str = ""

    @classmethod
    def of(cls, value: object, path: str = "") -> Fields:
        """Fields of a value that has to be an object."""
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{path or 'the request body'} must be a JSON object", param=path or None)
        return cls(value, path)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(name)

    def param(self, name: str) -> str:
        """The field's full name."""
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, expected: str) -> InvalidRequestError:
        """The error for this field: what was got, in short, and what was expected."""
        return InvalidRequestError(
            f"{self.param(name)} must be {expected}, not {self._shown(name)}",
            param=self.param(name),
            code="invalid_value",
        )

    def unserved(self, name: str, sentence: str) -> InvalidRequestError:
        """The error for a field that asks for something that is not served."""
        return InvalidRequestError(
            f"{self.param(name)} {self._shown(name)} is not supported: {sentence}",
            param=self.param(name),
            code="not_supported",
        )

    @overload
    def integer(self, name: str, default: int, low: int, high: int) -> int: ...
    @overload
    def integer(self, name: str, default: None, low: int, high: int) -> int | None: ...
    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        value = self.values.get(name)
        if value is None:
            return default
        if not is_integer(value) or not low <= value <= high:
            raise self.refuse(name, f"a whole number {_range(low, high)}")
        return int(value)

    def number(self, name: str, default: float, low: float, high: float, *, is_low_open: bool = False) -> float:
        """A finite number in [low, high], or in (low, high]."""
        value = self.values.get(name)
        if value is None:
            return default
        number = as_finite(value)
        if number is None or not low <= number <= high or (is_low_open and number == low):
            upper = f"{high:g}]" if math.isfinite(high) else "infinity)"
            raise self.refuse(name, f"a number in {'(' if is_low_open else '['}{low:g}, {upper}")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        """A field that is true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    @overload
    def text(self, name: str, default: str, *, max_length: int = ...) -> str: ...
    @overload
    def text(self, name: str, default: None = None, *, max_length: int = ...) -> str | None: ...
    def text(self, name: str, default: str | None = None, *, max_length: int = 2**31) -> str | None:
        """A string of at most `max_length` characters."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > max_length:
            raise self.refuse(name, "a string" + (f" of at most {max_length} characters" if max_length < 2**31 else ""))
        return value

    def object(self, name: str) -> Fields | None:
        """The fields of a JSON object."""
        value = self.values.get(name)
        return None if value is None else Fields.of(value, self.param(name))

    def items(self, name: str, expected: str, *, max_items: int = 2**31) -> list[Any] | None:
        """A list of at most `max_items` values."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > max_items:
            raise self.refuse(name, expected)
        return value

    def token_ids(self, name: str, vocab_size: int, *, max_items: int = 2**31) -> list[int]:
        """A list of token ids inside the vocabulary; empty when absent."""
        expected = f"a list of token ids in [0, {vocab_size})"
        expected += f", at most {max_items}" if max_items < 2**31 else ""
        ids = self.items(name, expected, max_items=max_items) or []
        wrong = next((token_id for token_id in ids if not is_token_id(token_id, vocab_size)), None)
        if wrong is not None or None in ids:
            raise InvalidRequestError(
                f"{self.param(name)} must be {expected}; {str(wrong)[:40]} is none",
                param=self.param(name),
                code="invalid_value",
            )
        return ids

    def forbid(self, name: str, sentence: str) -> None:
        """Refuse a field that asks for something that is not served, rather than ignore it."""
        if self.has(name):
            raise self.unserved(name, sentence)

    def _shown(self, name: str) -> str:
        shown = repr(self.values.get(name))
        return shown if len(shown) <= 60 else shown[:57] + "..."


def is_token_id(value: object, vocab_size: int) -> bool:
    """Whether a JSON value is a token id of the model."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def as_finite(value: object) -> float | None:
    """A JSON number as a float; None when it is none, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _range(low: int, high: int) -> str:
    return f"of at least {low}" if high >= 2**31 - 1 and low > -(2**31) else f"in [{low}, {high}]"
