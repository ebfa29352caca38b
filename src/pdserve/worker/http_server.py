"""Serves an ASGI application on a port of its own, on the caller's event loop, without touching signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from pdserve.errors import SettingError


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The worker's main function handles signals, not uvicorn."""
        yield


class HttpServer:
    """One listening port.

    Args:
        port: 0 takes any free one.

    Raises:
        SettingError: the port is taken.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self._socket.getsockname()[1]
        return port

    def start(self) -> None:
        """Serve from now on."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))

    async def stop(self) -> None:
        """Close; open connections get a second."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingError("METRICS_PORT", port, f"a free port on {host} ({error.strerror})") from error
    listener.listen(128)
    return listener
