"""Asks a process on this machine whether it is ready: one GET, no HTTP library."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit


async def http_status(url: str, timeout_s: float = 2.0) -> int | None:
    """The status of `GET url`; None when nothing answers in time."""
    parts = urlsplit(url)
    request = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                writer.write(request.encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    words = status_line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
