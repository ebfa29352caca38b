"""Peers of one NIXL agent: connected ones, and those that NIXL may forget only when their last READ has ended.

A peer is connected when a wire-up READ of a token came back: the first READ from a peer is slow, and this one proves
the way to it. Dies with its agent; never touches a KV block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor
from pdserve.transfer.nixl.agent import NativeList, NativeRead, NixlAgent, Region
from pdserve.transfer.nixl.payload import NixlPayload

TOKEN_BYTES = 16
_NUM_SCRATCH_SLOTS = 256
"""Peers that may be connected at once: each wire-up READ has a place of its own to write to."""


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer that is connected, or on its way to be, or leaving."""

    descriptor: Descriptor
    payload: NixlPayload
    blocks: NativeList
    """The agent's list of the peer's blocks."""
    token: NativeList
    """The agent's list of one piece: the peer's token."""
    slot: int
    """Scratch that the wire-up READ writes to."""
    wire_up: NativeRead | None
    """The wire-up READ, until it ended."""
    deadline_s: float
    """When the answer to the wire-up READ is overdue."""
    failure: TransferError | None = None
    num_reads: int = 0
    """READs of blocks that the agent has not seen the end of; counted by who posts them."""


class NixlPeers:
    """All peers of one agent.

    Args:
        agent: peers are loaded into it, and scratch memory is registered with it.
        connect_timeout_s: for the answer to a wire-up READ.
        clock: monotonic seconds.
    """

    def __init__(self, agent: NixlAgent, *, connect_timeout_s: float, clock: Callable[[], float]) -> None:
        self.agent = agent
        self._connect_timeout_s, self._clock = connect_timeout_s, clock
        self._connected: dict[WorkerRef, NixlPeer] = {}
        self._leaving: list[NixlPeer] = []
        self._scratch = np.zeros((_NUM_SCRATCH_SLOTS, TOKEN_BYTES), dtype=np.uint8)
        self._free_slots = list(range(_NUM_SCRATCH_SLOTS))
        agent.register([region_of(self._scratch)], "DRAM")
        self._slots = agent.prepare("", [region_of(slot) for slot in self._scratch], "DRAM")

    def is_known(self, descriptor: Descriptor) -> bool:
        """Whether a peer with this very descriptor is usable or awaited; an unanswered one is waited for once more."""
        known = self._connected.get(descriptor.peer)
        if known is None or known.failure is not None or known.descriptor != descriptor:
            return False
        known.deadline_s = max(known.deadline_s, self._clock() + self._connect_timeout_s)
        return True

    def generations_of(self, worker_id: str) -> list[WorkerRef]:
        """Peers, connected or awaited, with this worker id."""
        return [peer for peer in self._connected if peer.worker_id == worker_id]

    def add(self, descriptor: Descriptor, payload: NixlPayload) -> None:
        """Load a peer and post its wire-up READ.

        Raises:
            TransferError: reason connect: too many peers, or this one is still leaving, or NIXL cannot load it.
        """
        self.remove_ended()
        if any(peer.payload.agent_name == payload.agent_name for peer in self._leaving):
            raise TransferError(
                TransferReason.CONNECT, f"earlier READs from {descriptor.peer} have not ended yet; try again later"
            )
        if not self._free_slots:
            raise TransferError(
                TransferReason.CONNECT, f"{_NUM_SCRATCH_SLOTS} peers are connected; disconnect some first"
            )
        self.agent.add_peer(payload.metadata, payload.agent_name)
        try:
            peer = self._wire_up(descriptor, payload)
        except TransferError:
            self.agent.remove_peer(payload.agent_name)
            raise
        self._free_slots.remove(peer.slot)
        self._connected[descriptor.peer] = peer

    def find_usable(self, peer: WorkerRef) -> NixlPeer | None:
        """The peer once its wire-up READ came back; None while that is awaited.

        Raises:
            TransferError: reason connect: unknown peer, a failure, or no answer in time.
        """
        known = self._connected.get(peer)
        if known is None:
            raise TransferError(TransferReason.CONNECT, f"{peer} is not connected")
        has_answered = self._watch_wire_up(known)
        if known.failure is not None:
            raise TransferError(known.failure.reason, str(known.failure))
        if has_answered:
            return known
        if self._clock() >= known.deadline_s:
            raise TransferError(TransferReason.CONNECT, f"{peer} did not answer within {self._connect_timeout_s} s")
        return None

    def leave(self, peer: WorkerRef) -> NixlPeer | None:
        """Disconnect a peer; NIXL forgets it when its last READ has ended. Returns it; None if it was unknown."""
        known = self._connected.pop(peer, None)
        if known is not None:
            self._leaving.append(known)
        return known

    def remove_ended(self) -> None:
        """Forget leaving peers whose READs have all ended; removing one earlier would fence nothing."""
        for peer in list(self._leaving):
            if self._watch_wire_up(peer) and not peer.num_reads:
                self._leaving.remove(peer)
                self.agent.release(peer.blocks)
                self.agent.release(peer.token)
                self.agent.remove_peer(peer.payload.agent_name)
                self._free_slots.append(peer.slot)

    def _wire_up(self, descriptor: Descriptor, payload: NixlPayload) -> NixlPeer:
        regions = block_regions(payload.base_address, descriptor.num_blocks, descriptor.block_bytes, payload.device_id)
        blocks = self.agent.prepare(payload.agent_name, regions, payload.memory)
        token = self.agent.prepare(payload.agent_name, [(payload.token_address, TOKEN_BYTES, 0)], "DRAM")
        slot = self._free_slots[-1]
        self._scratch[slot] = 0
        wire_up, _ = self.agent.post_read(self._slots, [slot], token, [0])
        return NixlPeer(descriptor, payload, blocks, token, slot, wire_up, self._clock() + self._connect_timeout_s)

    def _watch_wire_up(self, peer: NixlPeer) -> bool:
        """Whether the wire-up READ has ended; then the peer is usable, or has a failure."""
        if peer.wire_up is None:
            return True
        has_ended, failure = self.agent.has_ended(peer.wire_up)
        if not has_ended:
            return False
        self.agent.release(peer.wire_up)
        peer.wire_up = None
        if not failure and self._scratch[peer.slot].tobytes() != peer.payload.token:
            failure = "the wire-up READ found another process's memory"
        if failure:
            peer.failure = TransferError(TransferReason.CONNECT, f"cannot READ from {peer.descriptor.peer}: {failure}")
        return True


def region_of(array: NDArray[np.uint8]) -> Region:
    """The host memory of a contiguous array."""
    return (array.ctypes.data, array.nbytes, 0)


def block_regions(base: int, num_blocks: int, block_bytes: int, device_id: int) -> list[Region]:
    """One region for each block of a pool that begins at address `base`."""
    return [(base + block_id * block_bytes, block_bytes, device_id) for block_id in range(num_blocks)]
