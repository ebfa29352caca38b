"""What the tcp backend says on a connection, and how frames are read: bounded, typed, never pickled.

    reader                                  server
    Hello(worker, generation, signature) →
                                          ← Answer          refused: the connection ends
    Read(nonce, block_ids)               →
                                          ← Answer(num_bytes), the blocks' bytes, Answer
    Read(…)                              →  …

The second answer tells that the hand-off could still read these blocks after the last byte was sent: else they
may have been given to another sequence meanwhile. Frames are msgpack behind a 4-byte big-endian length.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TypeVar

import msgspec

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason

MAX_FRAME_BYTES = 1 << 20
PROTOCOL_VERSION = 1
_LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Names the worker that the reader believes to talk to."""

    version: int = PROTOCOL_VERSION
    worker_id: str
    generation: str
    kv_signature: str


class Read(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send these blocks of this hand-off."""

    nonce: str
    block_ids: list[int]


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Granted when `reason` is empty."""

    reason: str = ""
    """Why it is refused, a `TransferReason`: nonce, generation, geometry or lookup."""
    detail: str = ""
    num_bytes: int = 0
    """Bytes that follow this answer."""


class TcpPayload(msgspec.Struct, frozen=True, kw_only=True):
    """What `Descriptor.payload` carries for backend tcp."""

    host: str
    port: int


Frame = TypeVar("Frame", Hello, Read, Answer)


def send_frame(connection: socket.socket, frame: Hello | Read | Answer) -> None:
    """Send one frame; raises OSError when the connection is broken."""
    body = msgspec.msgpack.encode(frame)
    assert len(body) <= MAX_FRAME_BYTES, f"a frame of {len(body)} bytes"
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(connection: socket.socket, kind: type[Frame]) -> Frame:
    """The next frame, which must be of this kind.

    Raises:
        OSError: the connection broke, timed out or ended.
        TransferError: reason lookup: not a frame of this kind, or too long.
    """
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (num_bytes,) = _LENGTH.unpack(head)
    if num_bytes > MAX_FRAME_BYTES:
        raise TransferError(
            TransferReason.LOOKUP, f"a frame of {num_bytes} bytes, at most {MAX_FRAME_BYTES} are allowed"
        )
    body = bytearray(num_bytes)
    receive_into(connection, memoryview(body))
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(TransferReason.LOOKUP, f"unreadable {kind.__name__} frame: {error}") from error


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer. Raises OSError when the connection broke, timed out or ended before it was full."""
    while view:
        num_bytes = connection.recv_into(view)
        if num_bytes == 0:
            raise ConnectionResetError("the connection ended")
        view = view[num_bytes:]


def wake(connection: socket.socket) -> None:
    """End a connection that another thread uses. Only that thread may close it: its number could be used again."""
    with contextlib.suppress(OSError):  # it had ended already
        connection.shutdown(socket.SHUT_RDWR)


def hang_up(connection: socket.socket) -> None:
    """End a connection of one's own."""
    wake(connection)
    connection.close()
