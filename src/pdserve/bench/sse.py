"""Server-sent events, read incrementally from chunks of bytes that may be cut anywhere. Never decodes JSON.

Only what streaming completions use: `data:` lines, comments and other fields skipped, an empty line ends an event.
"""

from __future__ import annotations


class SseParser:
    """Feed it bytes as they arrive; it returns the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data payloads of the events that `chunk` completed, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
