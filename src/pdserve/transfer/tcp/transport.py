"""Transport over plain TCP: framed copies that work on any platform, authenticated by each hand-off's nonce.

Slower than NIXL's one-sided READs, but a frozen or dying peer costs only its own hand-offs, and a READ that
ended, however it ended, is terminal: nothing here writes a block but a thread that has stopped by then.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from pdserve.addresses import peer_host
from pdserve.errors import TransferError
from pdserve.ids import GenerationId, KvSignature, Nonce, WorkerId
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor, Handle, PullResult, PullState, Transport
from pdserve.transfer.descriptor import check_compatible, check_intact, seal
from pdserve.transfer.memory import BlockMemory
from pdserve.transfer.tcp.grants import Grants
from pdserve.transfer.tcp.reader import PeerReader, TcpRead
from pdserve.transfer.tcp.server import BlockServer, open_listener
from pdserve.transfer.tcp.wire import TcpPayload


class TcpTransport:
    """A `Transport` over sockets of its own.

    Args:
        host: address to listen on (TRANSFER_HOST).
        port: port to listen on (TRANSFER_PORT); 0 = any free one.
        advertise_host: address that peers reach this worker at (ADVERTISE_HOST); "" = `host`, or an
            address of this machine that peers can reach where `host` means all of them.
        connect_timeout_s: for a peer's answer to a greeting.
        connections_per_peer: READs from one peer that run at the same time.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        connect_timeout_s: float = 2.0,
        connections_per_peer: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._port = host, port
        self._advertise_host = advertise_host or peer_host(host)
        self._connect_timeout_s = connect_timeout_s
        self._connections_per_peer = connections_per_peer
        self._clock = clock
        self._handles = itertools.count(1)
        self._grants = Grants()
        self._server: BlockServer | None = None
        self._peers: dict[WorkerRef, PeerReader] = {}
        self._reads: dict[Handle, tuple[TcpRead, PeerReader]] = {}
        self._results: list[PullResult] = []
        self._ended: deque[tuple[TcpRead, TransferError | None]] = deque()  # appended by the readers' threads

    def register(
        self, kv_cache: torch.Tensor, worker_id: WorkerId, generation: GenerationId, kv_signature: KvSignature
    ) -> Descriptor:
        """Listen, and serve the block pool to readers that know a nonce."""
        assert self._server is None, "register is called once"
        self._memory = BlockMemory(kv_cache)
        listener, identity = open_listener(self._host, self._port), WorkerRef(worker_id, generation)
        payload = TcpPayload(host=self._advertise_host, port=listener.getsockname()[1])
        self._server = BlockServer(self._memory, self._grants, identity, kv_signature, listener)
        self._own = seal(
            Descriptor(
                backend=self.name,
                worker_id=worker_id,
                generation=generation,
                num_blocks=self._memory.num_blocks,
                block_bytes=self._memory.block_bytes,
                kv_signature=kv_signature,
                payload=msgspec.msgpack.encode(payload),
            )
        )
        return self._own

    def another_reader(self) -> Transport | None:
        """None: connections have threads of their own, so that another reader would gain nothing."""
        return None

    def expect(self, nonce: Nonce, block_ids: list[int]) -> None:
        """Let a hand-off with this nonce read these blocks."""
        assert all(0 <= block_id < self._memory.num_blocks for block_id in block_ids), block_ids
        self._grants.allow(nonce, block_ids)

    def forget(self, nonce: Nonce) -> None:
        """Let a hand-off with this nonce read nothing any more."""
        self._grants.forget(nonce)

    def start_connect(self, descriptor: Descriptor) -> None:
        """Start the threads of this peer; the first one connects and greets at once, which proves the way."""
        check_intact(descriptor)
        check_compatible(self._own, descriptor)
        known = self._peers.get(descriptor.peer)
        if known and known.failure is None and known.descriptor.checksum == descriptor.checksum:
            return
        try:
            payload = msgspec.msgpack.decode(descriptor.payload, type=TcpPayload)
        except msgspec.MsgspecError as error:
            raise TransferError(
                TransferReason.LOOKUP, f"the tcp descriptor of {descriptor.peer} is unreadable: {error}"
            ) from error
        for peer in [peer for peer in self._peers if peer.worker_id == descriptor.worker_id]:
            self.disconnect(peer)
        self._peers[descriptor.peer] = PeerReader(
            descriptor,
            payload,
            self._memory,
            on_end=lambda read, failure: self._ended.append((read, failure)),
            num_connections=self._connections_per_peer,
            connect_timeout_s=self._connect_timeout_s,
        )

    def is_connected(self, peer: WorkerRef) -> bool:
        """Whether the peer has answered the first greeting."""
        reader = self._peers.get(peer)
        if reader is None:
            raise TransferError(TransferReason.CONNECT, f"{peer} is not connected")
        if reader.failure is not None:
            raise TransferError(reader.failure.reason, str(reader.failure)) from reader.failure
        return reader.is_ready

    def pull(
        self, peer: WorkerRef, nonce: Nonce, remote_ids: list[int], local_ids: list[int], deadline_s: float
    ) -> Handle:
        """Queue one READ for the threads of this peer."""
        assert len(remote_ids) == len(local_ids) > 0, (remote_ids, local_ids)
        if not self.is_connected(peer):
            raise TransferError(TransferReason.CONNECT, f"{peer} has not answered yet")
        reader = self._peers[peer]
        if not all(0 <= block_id < reader.descriptor.num_blocks for block_id in remote_ids):
            raise TransferError(
                TransferReason.GEOMETRY, f"{peer} has {reader.descriptor.num_blocks} blocks, wanted {remote_ids}"
            )
        read = TcpRead(Handle(next(self._handles)), nonce, remote_ids, local_ids, deadline_s)
        self._reads[read.handle] = (read, reader)
        reader.submit(read)
        return read.handle

    def poll(self) -> list[PullResult]:
        """Take what the threads ended; a READ whose deadline passed is reported when its thread has stopped."""
        now_s = self._clock()
        for read, _ in list(self._reads.values()):
            if now_s >= read.deadline_s:
                self._give_up(read, TransferReason.TIMEOUT)
        while self._ended:
            read, failure = self._ended.popleft()
            if self._reads.pop(read.handle, None) is not None:
                self._report(read, failure)
        results = self._results.copy()
        self._results.clear()
        return results

    def abort(self, handle: Handle) -> bool:
        """Hang up on a READ and wait for its thread, which is the fence."""
        if handle not in self._reads:
            return True
        read, _ = self._reads[handle]
        is_terminal = read.stop(TransferReason.ABORTED)
        if is_terminal:
            del self._reads[handle]
        return is_terminal

    def disconnect(self, peer: WorkerRef) -> None:
        """Hang up on a peer, and wait for the threads of its READs."""
        reader = self._peers.pop(peer, None)
        if reader is None:
            return
        reader.close()
        active = [read for read, its in self._reads.values() if its is reader]
        for read in active:
            read.give_up(TransferReason.DISCONNECTED)  # all of them, before the first one is waited for
        for read in active:
            read.stop(TransferReason.DISCONNECTED)
            self._give_up(read, TransferReason.DISCONNECTED)

    def recreate(self) -> Descriptor:
        """Stop all readers; the server stays, and the descriptor with it."""
        for peer in list(self._peers):
            self.disconnect(peer)
        still_writing = [read.handle for read, _ in self._reads.values() if not read.stop(TransferReason.DISCONNECTED)]
        assert not still_writing, f"READs {still_writing} cannot be stopped"
        self._reads.clear()
        self._ended.clear()
        self._results.clear()
        return self._own

    def serve(self) -> None:
        """Nothing to do: the server has threads of its own."""

    def close(self) -> None:
        """Stop all readers and the server."""
        for peer in list(self._peers):
            self.disconnect(peer)
        if self._server is not None:
            self._server.close()

    def _give_up(self, read: TcpRead, reason: TransferReason) -> None:
        """Report a READ at once when no thread is writing for it; else when that thread has stopped."""
        read.give_up(reason)
        if not read.is_writing:
            del self._reads[read.handle]
            self._report(read, None)

    def _report(self, read: TcpRead, failure: TransferError | None) -> None:
        reason = read.given_up or (failure.reason if failure else None)
        state = PullState.FAILED if reason else PullState.DONE
        self._results.append(PullResult(read.handle, state, reason, detail=str(failure or "")))
