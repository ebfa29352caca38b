"""The socket side of gateways and workers: uvicorn with bounded buffers and heads, ended by its owner alone.

A port that is closed behind its back is noticed within a second and ends `run` with an error.

What a client has not read is kept up to `stream_buffer_bytes`; beyond that writing waits, and sse.py gives the client
up after its stall timeout. The kernel closes connections whose peer has vanished in the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.addresses import bind, listen_on, peer_host

ABORT = "pdserve.abort"
"""Scope extension: closes the connection at once and forgets what it has not written."""
MAX_HEAD_BYTES = 64 * 1024
"""Path and headers of one request, give or take what arrives together."""
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

    def __init__(
        self, app: ASGIApp, sock: socket.socket, *, stream_buffer_bytes: int = 1 << 20, stall_timeout_s: float = 30.0
    ) -> None:
        self._sock = sock
        config = uvicorn.Config(
            app,
            http=_bounded_protocol(stream_buffer_bytes, stall_timeout_s),
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


def _bounded_protocol(stream_buffer_bytes: int, stall_timeout_s: float) -> type[asyncio.Protocol]:
    """The HTTP protocol with this process's limits on every connection."""

    class BoundedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._is_in_head, self._num_head_bytes = True, 0
            transport.set_write_buffer_limits(high=stream_buffer_bytes)
            sock = cast("socket.socket | None", transport.get_extra_info("socket"))
            option: Any = getattr(socket, "TCP_USER_TIMEOUT", None)
            if sock is not None and option is not None and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, option, int(1000 * stall_timeout_s))

        def on_message_begin(self) -> None:
            self._is_in_head, self._num_head_bytes = True, 0
            super().on_message_begin()
            cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: self.transport.abort}

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """The parser has no limit of its own for a head that does not end."""
            if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's head is too large.")
                return
            self._num_head_bytes += len(data) if self._is_in_head else 0
            super().data_received(data)

    return BoundedProtocol
