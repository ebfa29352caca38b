"""What the operator tells of itself: /metrics, and /health for its liveness probe."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_STUCK_S = 300.0
"""Not one look at any service for this long, although there are some: the process is worth a restart."""
_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Telemetry:
    """Counters, and the time of the last look."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._duration = Histogram(
            "pd_operator_reconcile_seconds", "Duration of one look at a service.", buckets=_BUCKETS_S,
            registry=self._registry,
        )  # fmt: skip
        self._failures = Counter(
            "pd_operator_reconcile_failures_total", "Looks that failed and are tried again.", registry=self._registry
        )
        self._leads = Gauge("pd_operator_is_leader", "1 while this process acts.", registry=self._registry)
        self._looked_s = time.monotonic()
        self._num_looking = 0

    @contextlib.contextmanager
    def reconciling(self) -> Iterator[None]:
        """A context around one look at a service."""
        self._num_looking += 1
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._num_looking -= 1
            self._looked_s = time.monotonic()
            self._duration.observe(self._looked_s - began_s)

    def failed(self) -> None:
        """Count a look that failed."""
        self._failures.inc()

    def leads(self, is_leader: bool) -> None:
        """Whether this process acts."""
        self._leads.set(is_leader)

    @property
    def problem(self) -> str | None:
        """Why this process should be restarted."""
        age_s = time.monotonic() - self._looked_s
        return f"a look has been running for {age_s:.0f} s" if self._num_looking and age_s > _STUCK_S else None

    def text(self) -> bytes:
        """All metrics as Prometheus text."""
        return generate_latest(self._registry)


async def serve(telemetry: Telemetry, sock: socket.socket) -> asyncio.Server:
    """Answer GET /metrics and /health on a listening socket; nothing else is worth an HTTP library here."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(telemetry, head.split(b" ", 2)[1] if head.count(b" ") > 1 else b""))
                await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, sock=sock)


def _response(telemetry: Telemetry, path: bytes) -> bytes:
    if path == b"/metrics":
        status, kind, body = "200 OK", "text/plain; version=0.0.4; charset=utf-8", telemetry.text()
    elif path == b"/health":
        problem = telemetry.problem
        status = "200 OK" if problem is None else "503 Service Unavailable"
        kind, body = "text/plain", (problem or "live").encode()
    else:
        status, kind, body = "404 Not Found", "text/plain", b"/metrics or /health"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
