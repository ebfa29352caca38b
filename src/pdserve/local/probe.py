"""Asks a process on this machine by one GET: no HTTP library."""

from __future__ import annotations

import asyncio
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    """The status and body of one answer."""

    status: int
    body: bytes


async def http_get(url: str, timeout_s: float = 2.0) -> Answer | None:
    """The answer to `GET url`; None when nothing answers in time, or not in HTTP."""
    parts = urlsplit(url)
    request = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                writer.write(request.encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    words = head.split(maxsplit=2)
    return Answer(int(words[1]), body) if len(words) > 1 and words[1].isdigit() else None
