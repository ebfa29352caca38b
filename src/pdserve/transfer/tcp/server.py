"""Passive side of the tcp backend: serves blocks to readers that know a hand-off's nonce. Never writes a block."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from pdserve.addresses import bind, listen_on
from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.memory import BlockMemory
from pdserve.transfer.tcp.grants import Grants
from pdserve.transfer.tcp.wire import PROTOCOL_VERSION, Answer, Hello, Read, hang_up, receive_frame, send_frame, wake

_ACCEPT_POLL_S = 0.5
"""How soon `close` is noticed where ending a listening socket wakes no thread that accepts on it."""
_FRAME_TIMEOUT_S = 5.0
"""How long a greeting may take, or a whole piece that the reader's side has to take in."""
_IDLE_TIMEOUT_S = 120.0
"""How long a connection may last without a Read."""

_log = logging.getLogger(__name__)


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        TransferError: reason lookup: the port cannot be bound.
    """
    try:
        listener = listen_on(bind(host, port), backlog=128)
        listener.setblocking(True)
        return listener
    except OSError as error:
        raise TransferError(
            TransferReason.LOOKUP, f"cannot listen on TRANSFER_HOST {host}, TRANSFER_PORT {port}: {error}"
        ) from error


class BlockServer:
    """Answers each connection in a thread of its own.

    Args:
        memory: the blocks to serve.
        grants: which hand-off may read which of them.
        identity: the worker and generation that readers must name.
        kv_signature: what the blocks mean; readers must name the same.
        listener: a listening socket, closed with the server.
        max_connections: further ones are hung up on at once.
    """

    def __init__(
        self,
        memory: BlockMemory,
        grants: Grants,
        identity: WorkerRef,
        kv_signature: str,
        listener: socket.socket,
        *,
        max_connections: int = 256,
    ) -> None:
        self._memory, self._grants = memory, grants
        self._identity, self._kv_signature = identity, kv_signature
        self._listener, self._max_connections = listener, max_connections
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._listener.settimeout(_ACCEPT_POLL_S)
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close every connection and wait for all threads. Again: nothing."""
        with self._lock:
            self._is_closed = True
            connections = dict(self._connections)
        for connection in (self._listener, *connections):
            wake(connection)
        for thread in (self._acceptor, *connections.values()):
            if thread is not threading.current_thread():
                thread.join(_FRAME_TIMEOUT_S)

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    if not self._is_closed:
                        _log.warning("a KV reader's connection was not accepted: %s", error)
                        time.sleep(_ACCEPT_POLL_S)  # out of file descriptors, most likely
                    continue
                if not self._start(connection):
                    _log.warning("hung up on %s: %d connections are open", address, self._max_connections)
                    hang_up(connection)

    def _start(self, connection: socket.socket) -> bool:
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-serve", daemon=True)
        with self._lock:
            if self._is_closed or len(self._connections) >= self._max_connections:
                return False
            self._connections[connection] = thread
            thread.start()
        return True

    def _serve(self, connection: socket.socket) -> None:
        """One connection from greeting to end."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_FRAME_TIMEOUT_S)
            if self._greet(connection):
                while True:
                    self._answer_read(connection)
        except TransferError as error:
            _log.warning("a KV reader sent nonsense: %s", error)
            with contextlib.suppress(OSError):
                send_frame(connection, Answer(reason=error.reason, detail=str(error)))
        except OSError:
            pass  # the reader went away, or took too long
        finally:
            hang_up(connection)
            with self._lock:
                self._connections.pop(connection, None)

    def _greet(self, connection: socket.socket) -> bool:
        """Whether the reader wants exactly this worker, and its blocks mean the same there and here."""
        hello = receive_frame(connection, Hello)
        answer = Answer()
        if hello.version != PROTOCOL_VERSION:
            answer = Answer(
                reason=TransferReason.GEOMETRY,
                detail=f"protocol version {PROTOCOL_VERSION} here, {hello.version} there",
            )
        elif (hello.worker_id, hello.generation) != self._identity:
            answer = Answer(reason=TransferReason.GENERATION, detail=f"this is {self._identity}")
        elif hello.kv_signature != self._kv_signature:
            answer = Answer(reason=TransferReason.GEOMETRY, detail="the KV signatures differ")
        send_frame(connection, answer)
        return not answer.reason

    def _answer_read(self, connection: socket.socket) -> None:
        connection.settimeout(_IDLE_TIMEOUT_S)
        read = receive_frame(connection, Read)
        connection.settimeout(_FRAME_TIMEOUT_S)
        refusal = self._grants.refusal(read.nonce, read.block_ids)
        if refusal:
            send_frame(connection, Answer(reason=refusal, detail="no hand-off with this nonce may read these blocks"))
            return
        send_frame(connection, Answer(num_bytes=len(read.block_ids) * self._memory.block_bytes))
        for block_id in read.block_ids:
            connection.sendall(self._memory.load(block_id))
        refusal = self._grants.refusal(read.nonce, read.block_ids)
        if refusal:
            send_frame(connection, Answer(reason=refusal, detail="the lease ended while the blocks were sent"))
        else:
            send_frame(connection, Answer())
