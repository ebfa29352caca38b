"""Transport over NIXL: one-sided READs out of a peer's memory by UCX (shared memory, CUDA IPC, RDMA).

NIXL has no timeouts, and releasing an active READ or removing its peer fences nothing. So every READ has a
deadline here, a READ that was given up is watched until NIXL says that it ended (its blocks stay quarantined),
and `recreate` and `close` destroy the whole agent, which is the one fence there is.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pdserve.errors import TransferError
from pdserve.ids import GenerationId, KvSignature, Nonce, WorkerId
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor, Handle, PullResult, PullState, Transport
from pdserve.transfer.descriptor import check_compatible, check_intact, seal
from pdserve.transfer.memory import bytes_view
from pdserve.transfer.nixl.agent import NativeRead, NixlAgent, prepare_environment
from pdserve.transfer.nixl.cma import allow_readers
from pdserve.transfer.nixl.payload import NixlPayload, decode_payload, encode_payload, has_rdma, node_id, one_sided_ways
from pdserve.transfer.nixl.peers import TOKEN_BYTES, NixlPeer, NixlPeers, block_regions, region_of


@dataclass(slots=True, eq=False)
class _Read:
    handle: Handle
    native: NativeRead
    peer: NixlPeer
    deadline_s: float
    given_up: TransferReason | None = None
    """Why it was given up; it is watched until it ended all the same."""


class NixlTransport:
    """A `Transport` over one NIXL agent.

    Args:
        host: address that peers reach this worker at; on a loopback address UCX is kept off other interfaces.
        progress_thread: let NIXL make progress on its own, for a core per process; without, `serve` does.
        connect_timeout_s: for the answer to the wire-up READ.
        is_known_to_work: do not try it out first.

    Raises:
        TransferError: reason lookup: NIXL does not work here.
    """

    name = "nixl"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        progress_thread: bool = False,
        connect_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        is_known_to_work: bool = False,
    ) -> None:
        prepare_environment(host)
        self._host = host
        self._progress_thread = progress_thread
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._handles = itertools.count(1)
        if not is_known_to_work:  # fails here and not at the first hand-off where it does not
            NixlAgent(f"probe:{secrets.token_hex(4)}", progress_thread=False).destroy()
        self._token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), dtype=np.uint8).copy()
        self._peers: NixlPeers | None = None
        """Peers of the agent that is alive; None before `register`, and when an agent could not be recreated."""
        self._reads: dict[Handle, _Read] = {}
        self._results: list[PullResult] = []

    def register(
        self, kv_cache: torch.Tensor, worker_id: WorkerId, generation: GenerationId, kv_signature: KvSignature
    ) -> Descriptor:
        """Create the agent, with the block pool registered."""
        assert self._peers is None, "register is called once"
        allow_readers()
        self._kv_cache = bytes_view(kv_cache)
        self._identity = (worker_id, generation, kv_signature)
        return self._build()

    def another_reader(self) -> Transport | None:
        """A transport with an agent of its own; None for device memory, which devices copy."""
        if self._kv_cache.device.type != "cpu":
            return None
        reader = NixlTransport(
            host=self._host,
            progress_thread=self._progress_thread,
            connect_timeout_s=self._connect_timeout_s,
            clock=self._clock,
            is_known_to_work=True,
        )
        reader.register(self._kv_cache, *self._identity)
        return reader

    def expect(self, nonce: Nonce, block_ids: list[int]) -> None:
        """Nothing to do: a peer that holds the descriptor may READ every block."""

    def forget(self, nonce: Nonce) -> None:
        """Nothing to do: READs over NIXL know no nonce."""

    def start_connect(self, descriptor: Descriptor) -> None:
        """Load the peer and post its wire-up READ; one that is still unanswered is waited for once more."""
        peers = self._live
        if peers.is_known(descriptor):
            return
        check_intact(descriptor)
        check_compatible(self._own, descriptor)
        payload = decode_payload(descriptor)
        for peer in peers.generations_of(descriptor.worker_id):
            self.disconnect(peer)
        peers.add(descriptor, payload)

    def is_connected(self, peer: WorkerRef) -> bool:
        """Whether the wire-up READ has come back from this peer."""
        return self._live.find_usable(peer) is not None

    def pull(
        self, peer: WorkerRef, nonce: Nonce, remote_ids: list[int], local_ids: list[int], deadline_s: float
    ) -> Handle:
        """Post one READ; over shared memory it is mostly done when this returns."""
        assert len(remote_ids) == len(local_ids) > 0, (remote_ids, local_ids)
        peers = self._live
        known = peers.find_usable(peer)
        if known is None:
            raise TransferError(TransferReason.CONNECT, f"{peer} has not answered yet")
        if min(remote_ids) < 0 or max(remote_ids) >= known.descriptor.num_blocks:
            raise TransferError(
                TransferReason.GEOMETRY, f"{peer} has {known.descriptor.num_blocks} blocks, wanted {remote_ids}"
            )
        try:
            native, has_ended = peers.agent.post_read(self._local_blocks, local_ids, known.blocks, remote_ids)
        except TransferError as error:
            known.failure = TransferError(
                TransferReason.CONNECT, f"the connection to {peer} is broken ({error}); connect again"
            )
            raise
        handle = Handle(next(self._handles))
        if has_ended:
            peers.agent.release(native)
            self._results.append(PullResult(handle, PullState.DONE))
        else:
            self._reads[handle] = _Read(handle, native, known, deadline_s)
            known.num_reads += 1
        return handle

    def poll(self) -> list[PullResult]:
        """Ask NIXL for the state of every READ that has not ended."""
        for read in list(self._reads.values()):
            self._watch(read)
        if self._peers is not None:
            self._peers.remove_ended()
        results = self._results.copy()
        self._results.clear()
        return results

    def abort(self, handle: Handle) -> bool:
        """Give a READ up; NIXL cannot stop it, so it is terminal only if it has ended."""
        read = self._reads.get(handle)
        if read is None:
            self._results[:] = [result for result in self._results if result.handle != handle]
            return True
        has_ended, _ = self._live.agent.has_ended(read.native)
        if has_ended:
            self._drop(read)
            return True
        read.given_up = read.given_up or TransferReason.ABORTED
        return False

    def disconnect(self, peer: WorkerRef) -> None:
        """Drop a peer; NIXL forgets it when its last READ has ended."""
        known = self._peers.leave(peer) if self._peers is not None else None
        if known is None:
            return
        for read in self._reads.values():
            if read.peer is known and not read.given_up:
                self._give_up(read, TransferReason.DISCONNECTED)

    def recreate(self) -> Descriptor:
        """Destroy the agent and build another; it gets a new name, and the descriptor with it."""
        self.close()
        self._peers = None
        self._reads.clear()
        self._results.clear()
        return self._build()

    def serve(self) -> None:
        """Let NIXL answer peers' wire-ups and emulated READs."""
        if self._peers is not None:
            self._peers.agent.make_progress()

    def close(self) -> None:
        """Destroy the agent, which ends every READ of it."""
        if self._peers is not None:
            self._peers.agent.destroy()

    # --- inner workings

    @property
    def _live(self) -> NixlPeers:
        if self._peers is None:
            raise TransferError(TransferReason.CONNECT, "this worker has no NIXL agent: it could not be recreated")
        return self._peers

    def _build(self) -> Descriptor:
        """Create an agent without peers and READs, and the descriptor that announces it."""
        worker_id, generation, kv_signature = self._identity
        agent = NixlAgent(f"{worker_id}:{generation}:{secrets.token_hex(4)}", progress_thread=self._progress_thread)
        num_blocks, block_bytes = self._kv_cache.shape
        memory = "DRAM" if self._kv_cache.device.type == "cpu" else "VRAM"
        device_id = self._kv_cache.device.index or 0
        base = self._kv_cache.data_ptr()
        agent.register([(base, num_blocks * block_bytes, device_id)], memory)
        agent.register([region_of(self._token)], "DRAM")
        self._local_blocks = agent.prepare("", block_regions(base, num_blocks, block_bytes, device_id), memory)
        peers = NixlPeers(agent, connect_timeout_s=self._connect_timeout_s, clock=self._clock)
        payload = NixlPayload(
            agent_name=agent.name,
            metadata=agent.metadata(),
            base_address=base,
            memory=memory,
            device_id=device_id,
            pid=os.getpid(),
            token_address=region_of(self._token)[0],
            token=self._token.tobytes(),
            node=node_id(),
            ways=one_sided_ways(memory, os.environ.get("UCX_TLS", ""), is_rdma_here=has_rdma()),
        )
        self._own = seal(
            Descriptor(
                backend=self.name,
                worker_id=worker_id,
                generation=generation,
                num_blocks=num_blocks,
                block_bytes=block_bytes,
                kv_signature=kv_signature,
                payload=encode_payload(payload),
            )
        )
        self._peers = peers
        return self._own

    def _watch(self, read: _Read) -> None:
        """Report a READ when it ends, and when its deadline passes."""
        has_ended, failure = self._live.agent.has_ended(read.native)
        if has_ended:
            self._drop(read)
            self._report_end(read, failure)
        elif not read.given_up and self._clock() >= read.deadline_s:
            self._give_up(read, TransferReason.TIMEOUT)

    def _give_up(self, read: _Read, reason: TransferReason) -> None:
        read.given_up = reason
        self._report(read, PullState.FAILED, reason, is_terminal=False)

    def _report_end(self, read: _Read, failure: str) -> None:
        if failure:
            peer = read.peer.descriptor.peer
            read.peer.failure = TransferError(
                TransferReason.CONNECT, f"a READ from {peer} failed ({failure}); connect again"
            )
        if read.given_up:
            self._report(read, PullState.FAILED, read.given_up)
        elif failure:
            self._report(read, PullState.FAILED, TransferReason.COPY, detail=failure)
        else:
            self._report(read, PullState.DONE)

    def _report(
        self,
        read: _Read,
        state: PullState,
        reason: TransferReason | None = None,
        *,
        is_terminal: bool = True,
        detail: str = "",
    ) -> None:
        self._results.append(PullResult(read.handle, state, reason, is_terminal, detail))

    def _drop(self, read: _Read) -> None:
        del self._reads[read.handle]
        read.peer.num_reads -= 1
        self._live.agent.release(read.native)
