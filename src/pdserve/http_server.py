"""The socket side of gateways and workers: listeners, and a server around uvicorn that is ended by its owner alone.

A port that is closed behind its back is noticed within a second and ends `run` with an error.

What one connection may take and how HTTP is read on it is in http_protocol.py; a client that does not read is given up
by sse.py after its stall timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from pdserve.addresses import bind, listen_on, peer_host
from pdserve.http_protocol import ConnectionLimits, protocol_with

BACKLOG = 2048


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening TCP socket; `is_shared`: other processes listen on the same port, the kernel spreads connections.

    Raises:
        OSError: the address is in use or not ours.
    """
    sock = bind(host, port, is_shared=is_shared)
    try:
        return listen_on(sock, BACKLOG)
    except BaseException:
        sock.close()
        raise


def url_of(sock: socket.socket, host: str | None = None) -> str:
    """`http://host:port` of a listening socket; one on every address is told by an address that peers can reach."""
    bound, port = sock.getsockname()[:2]
    name = host or peer_host(bound)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


async def watch_port(sock: socket.socket) -> None:
    """Look once a second whether a socket still listens: one that is closed raises no error in an event loop.

    Raises:
        OSError: it does not.
    """
    port = sock.getsockname()[1]
    while True:
        try:
            is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
        except OSError:
            is_listening = False
        if not is_listening:
            raise OSError(f"port {port} does not listen any more")
        await asyncio.sleep(1.0)


class HttpServer:
    """One listener; it ends when `run` is cancelled, and waits for nothing then: its owner has drained before."""

    def __init__(self, app: ASGIApp, sock: socket.socket, limits: ConnectionLimits | None = None) -> None:
        self._sock = sock
        limits = limits or ConnectionLimits()
        config = uvicorn.Config(
            app,
            http=protocol_with(limits),
            timeout_keep_alive=cast("int", limits.idle_timeout_s),  # a float does as well
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _OwnedServer(config)

    async def run(self) -> None:
        """Serve until cancelled; the listener and all connections are closed then.

        Raises:
            ExceptionGroup: of one OSError, when the socket does not listen any more.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._server.serve(sockets=[self._sock]))
                tasks.create_task(watch_port(self._sock))
        finally:
            self._server.close()
            self._sock.close()


class _OwnedServer(uvicorn.Server):
    """Leaves signals to the process it runs in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers: list[asyncio.base_events.Server] = []

    async def main_loop(self) -> None:
        """Tick once a second instead of ten times; a tick renews the Date header of answers."""
        while True:
            await self.on_tick(0)
            await asyncio.sleep(1.0)

    def close(self) -> None:
        """Close the listener and all connections, and cancel what still answers."""
        for server in self.servers:
            with contextlib.suppress(OSError, ValueError):  # its socket has died
                server.close()
        for connection in list(self.server_state.connections):
            cast("Any", connection).transport.close()
        for task in list(self.server_state.tasks):
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
