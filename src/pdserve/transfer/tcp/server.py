"""Passive side of the tcp backend: serves blocks to readers that know a hand-off's nonce. Never writes a block."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.memory import BlockMemory
from pdserve.transfer.tcp.grants import Grants
from pdserve.transfer.tcp.wire import PROTOCOL_VERSION, Answer, Hello, Read, hang_up, receive_frame, send_frame, wake

_ACCEPT_POLL_S = 0.5
"""How soon `close` is noticed where ending a listening socket wakes nobody."""

_log = logging.getLogger(__name__)


class BlockServer:
    """Listens, and answers each connection in a thread of its own.

    Args:
        frame_timeout_s: for a greeting, for a whole piece to be taken by the reader's side.
        idle_timeout_s: for the next Read on a connection.
        max_connections: further ones are hung up on at once.

    Raises:
        TransferError: reason lookup: the port cannot be bound.
    """

    def __init__(
        self,
        memory: BlockMemory,
        grants: Grants,
        identity: WorkerRef,
        kv_signature: str,
        *,
        host: str,
        port: int,
        frame_timeout_s: float = 5.0,
        idle_timeout_s: float = 120.0,
        max_connections: int = 256,
    ) -> None:
        self._memory, self._grants = memory, grants
        self._identity, self._kv_signature = identity, kv_signature
        self._frame_timeout_s, self._idle_timeout_s = frame_timeout_s, idle_timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise TransferError(
                TransferReason.LOOKUP, f"cannot listen on TRANSFER_HOST {host}, TRANSFER_PORT {port}: {error}"
            ) from error
        self._listener.settimeout(_ACCEPT_POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Hang up on everybody and wait for all threads. Again: nothing."""
        with self._lock:
            self._is_closed = True
            connections = dict(self._connections)
        for connection in (self._listener, *connections):
            wake(connection)
        for thread in (self._acceptor, *connections.values()):
            if thread is not threading.current_thread():
                thread.join(self._frame_timeout_s)

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
            connection.settimeout(self._frame_timeout_s)
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
        connection.settimeout(self._idle_timeout_s)
        read = receive_frame(connection, Read)
        connection.settimeout(self._frame_timeout_s)
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
