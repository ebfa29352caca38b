"""Makes plain UTF-8 of a body that is compressed, has a byte order mark or is in another charset. Pure; blocks.

gzip and deflate are read, the latter with and without zlib's header, as clients send both. What is unpacked is bounded
by the same limit as what arrives, layer by layer. In UTF-8, UTF-16 and UTF-32 the bytes tell which one it is, whatever
is declared: JSON begins with an ASCII character. Everything else is refused by name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

from pdserve.errors import InvalidRequestError, RequestError
from pdserve.gateway.http.error_body import http_error

_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
MAX_CODINGS = 4
MAX_GZIP_MEMBERS = 1024
"""A gzip body may be several in a row; empty ones are no way to keep the process busy."""
_UNICODE = "utf-8 utf8 us-ascii ascii utf-16 utf-16le utf-16be utf-32 utf-32le utf-32be"
_SINGLE_BYTE = {
    "iso-8859-1": "latin-1", "latin-1": "latin-1", "latin1": "latin-1", "windows-1252": "cp1252", "cp1252": "cp1252",
    "iso-8859-15": "iso8859-15", "latin-9": "iso8859-15",
}  # fmt: skip
_CHARSETS = {**dict.fromkeys(_UNICODE.split()), **_SINGLE_BYTE}
"""Declared name → Python's name of a charset that the bytes cannot tell."""
_WINDOW_BYTES = 4096
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""The parameter `wbits` of zlib for each form."""


def codings_of(value: bytes) -> list[str]:
    """What a Content-Encoding names, in the order in which it was applied; `identity` counts as nothing.

    Raises:
        RequestError: 415, it names something else.
    """
    names = [name.strip().lower() for name in value.decode("latin-1").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    unknown = next((name for name in names if name not in _CODINGS), None)
    if unknown is not None:
        raise _unsupported(f"Content-Encoding {unknown[:40]!r} is not read; send gzip, deflate or identity.")
    if len(names) > MAX_CODINGS:
        raise _unsupported(f"Content-Encoding names {len(names)} encodings; at most {MAX_CODINGS} are read.")
    return [_CODINGS[name] for name in names]


def charset_of(content_type: bytes) -> str | None:
    """The charset that a Content-Type declares, None without one.

    Raises:
        RequestError: 415, it is none that is read.
    """
    for parameter in content_type.decode("latin-1").split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip("\"'").lower().replace("_", "-")
            if charset not in _CHARSETS:
                known = "utf-8, utf-16, utf-32, iso-8859-1, iso-8859-15 or windows-1252"
                raise http_error(415, f"The charset {charset[:40]!r} is not read; send {known}.")
            return charset
    return None


def as_utf8(data: bytes, codings: list[str], charset: str | None, max_bytes: int) -> bytes:
    """A body as plain UTF-8 without a byte order mark.

    Raises:
        RequestError: 400 damaged or cut off, 413 larger than `max_bytes` when unpacked.
    """
    for coding in reversed(codings):
        data = _unpack(data, coding, max_bytes)
    encoding = (_CHARSETS[charset] if charset else None) or json.detect_encoding(data)
    if encoding == "utf-8":
        return data
    try:
        return data.decode(encoding).encode()
    except UnicodeError:
        name = charset or encoding.removesuffix("-sig")
        raise InvalidRequestError(f"The request body is not valid {name}.", code="invalid_json") from None


def _unpack(data: bytes, coding: str, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        for piece in _pieces(data, coding):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise http_error(
                    413, f"The unpacked request body is larger than {max_bytes} bytes.", code="body_too_large"
                )
            pieces.append(piece)
    except zlib.error as error:
        reason = str(error).partition(": ")[2] or "damaged"
        raise _damaged(coding, reason) from None
    return b"".join(pieces)


def _pieces(data: bytes, coding: str) -> Iterator[bytes]:
    """What is inside, a little at a time; of gzip all members in a row, padded with zeros or not."""
    position, num_members = 0, 0
    wbits = _GZIP if coding == "gzip" else _ZLIB if _has_zlib_header(data) else _RAW
    while position < len(data) or not num_members:
        num_members += 1
        if num_members > MAX_GZIP_MEMBERS:
            raise _damaged(coding, f"it has more than {MAX_GZIP_MEMBERS} members")
        stream, rest = zlib.decompressobj(wbits), b""
        while not stream.eof:
            window = rest or data[position : position + _WINDOW_BYTES]
            position += 0 if rest else len(window)
            piece = stream.decompress(window, 64 * _WINDOW_BYTES)
            if not (window or piece or stream.eof):
                raise _damaged(coding, "it is cut off")
            yield piece
            rest = stream.unconsumed_tail
        position -= len(stream.unused_data)
        if coding == "gzip" and not data[position:].strip(b"\0"):
            return
        if coding == "deflate" and position < len(data):
            raise _damaged(coding, "something follows its end")


def _has_zlib_header(data: bytes) -> bool:
    return len(data) >= 2 and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0


def _damaged(coding: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is not valid {coding}: {reason}.", code="invalid_encoding")


def _unsupported(message: str) -> RequestError:
    return http_error(415, message, code="unsupported_encoding")
