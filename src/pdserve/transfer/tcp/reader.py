"""Active side of the tcp backend: the connections to one peer, and READs on them, in threads of their own.

The thread that receives a block is the only writer of it, and it has ended with a READ before the READ counts as
ended. So hanging up and waiting for the thread is a fence, and every READ that ended is terminal.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor, Handle
from pdserve.transfer.memory import BlockMemory
from pdserve.transfer.tcp.wire import (
    Answer,
    Hello,
    Read,
    TcpPayload,
    hang_up,
    receive_frame,
    receive_into,
    send_frame,
    wake,
)

_ABORT_WAIT_S = 1.0
"""How long a thread may take to notice that its connection was hung up: far more than it needs."""


@dataclass(slots=True, eq=False)
class TcpRead:
    """One READ on its way."""

    handle: Handle
    nonce: str
    remote_ids: list[int]
    local_ids: list[int]
    deadline_s: float
    given_up: TransferReason | None = None
    """Why it was given up: its thread writes no further block and reports nothing but this."""
    connection: socket.socket | None = None
    """While its thread may write blocks."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def give_up(self, reason: TransferReason) -> None:
        """Stop it: from now on at most the piece that is being received is written, until `ended` is set."""
        with self.lock:
            self.given_up = self.given_up or reason
            if self.connection is not None:
                wake(self.connection)

    @property
    def is_writing(self) -> bool:
        """Whether its thread may be writing blocks."""
        return self.connection is not None and not self.ended.is_set()

    def stop(self, reason: TransferReason) -> bool:
        """Give it up and wait for its thread. Whether it is terminal."""
        self.give_up(reason)
        if self.is_writing:
            self.ended.wait(_ABORT_WAIT_S)
        return not self.is_writing


OnEnd = Callable[[TcpRead, TransferError | None], None]


class PeerReader:
    """Connections to one peer. READs beyond their number wait in order.

    Args:
        on_end: called in a reader's thread, once per READ, after its last byte was written.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        payload: TcpPayload,
        memory: BlockMemory,
        on_end: OnEnd,
        *,
        num_connections: int,
        connect_timeout_s: float,
    ) -> None:
        self.descriptor = descriptor
        self.failure: TransferError | None = None
        """Why the first connection failed; None: it did not."""
        self.is_ready = False
        self._payload, self._memory, self._on_end = payload, memory, on_end
        self._connect_timeout_s = connect_timeout_s
        self._condition = threading.Condition()
        self._waiting: deque[TcpRead] = deque()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(number == 0,), name=f"kv-read-{descriptor.worker_id}", daemon=True)
            for number in range(num_connections)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: TcpRead) -> None:
        """Queue a READ for the next free connection."""
        with self._condition:
            self._waiting.append(read)
            self._condition.notify()

    def close(self) -> None:
        """Let the threads end; READs that wait are not begun, READs on their way are the caller's to stop."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _run(self, is_first: bool) -> None:
        connection: socket.socket | None = None
        if is_first:
            connection = self._first_connection()
        while (read := self._next()) is not None:
            failure: TransferError | None = None
            try:
                connection = self._perform(read, connection)
            except TransferError as error:
                failure = error
                connection = None
            read.ended.set()
            self._on_end(read, failure)
        if connection is not None:
            hang_up(connection)

    def _next(self) -> TcpRead | None:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None

    def _first_connection(self) -> socket.socket | None:
        try:
            connection = self._connect()
        except TransferError as error:
            self.failure = error
            return None
        self.is_ready = True
        return connection

    def _perform(self, read: TcpRead, connection: socket.socket | None) -> socket.socket | None:
        """One READ; returns the connection for the next one. On a kept connection that broke, tries a new one."""
        if read.given_up or self._is_closed:
            return connection
        if connection is not None:
            try:
                return self._transfer(read, connection)
            except BrokenBeforeAnswerError:
                hang_up(connection)
        return self._transfer(read, self._connect())

    def _transfer(self, read: TcpRead, connection: socket.socket) -> socket.socket:
        with read.lock:
            if read.given_up:
                return connection
            read.connection = connection
        try:
            connection.settimeout(max(0.001, read.deadline_s - time.monotonic()))
            self._copy(read, connection)
        except BaseException:
            with read.lock:
                read.connection = None
            hang_up(connection)
            raise
        with read.lock:
            read.connection = None
        return connection

    def _copy(self, read: TcpRead, connection: socket.socket) -> None:
        try:
            send_frame(connection, Read(nonce=read.nonce, block_ids=read.remote_ids))
            answer = receive_frame(connection, Answer)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise TransferError(TransferReason.TIMEOUT, "no answer to a READ") from error
            raise BrokenBeforeAnswerError(TransferReason.COPY, f"{self.descriptor.peer} hung up: {error}") from error
        _check(answer)
        if answer.num_bytes != len(read.local_ids) * self._memory.block_bytes:
            raise TransferError(
                TransferReason.GEOMETRY, f"{answer.num_bytes} bytes offered for {len(read.local_ids)} blocks"
            )
        try:
            for block_id in read.local_ids:
                self._memory.receive(block_id, lambda view: receive_into(connection, view))
            _check(receive_frame(connection, Answer))
        except OSError as error:
            reason = TransferReason.TIMEOUT if isinstance(error, TimeoutError) else TransferReason.COPY
            raise TransferError(reason, f"{self.descriptor.peer}: {error}") from error

    def _connect(self) -> socket.socket:
        address = (self._payload.host, self._payload.port)
        try:
            connection = socket.create_connection(address, timeout=self._connect_timeout_s)
        except OSError as error:
            raise TransferError(
                TransferReason.CONNECT, f"cannot reach {self.descriptor.peer} at {address}: {error}"
            ) from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(connection)
        except OSError as error:
            hang_up(connection)
            raise TransferError(TransferReason.CONNECT, f"{self.descriptor.peer} did not answer: {error}") from error
        except TransferError:
            hang_up(connection)
            raise
        return connection

    def _greet(self, connection: socket.socket) -> None:
        peer = self.descriptor
        hello = Hello(worker_id=peer.worker_id, generation=peer.generation, kv_signature=peer.kv_signature)
        send_frame(connection, hello)
        _check(receive_frame(connection, Answer))


class BrokenBeforeAnswerError(TransferError):
    """A connection ended before the peer answered a READ: nothing was written, another connection may do."""


def _check(answer: Answer) -> None:
    if answer.reason:
        raise TransferError(TransferReason(answer.reason), answer.detail)
