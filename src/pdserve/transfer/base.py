"""The transport interface: how a decode worker READs KV blocks out of a prefill worker's memory.

The interface speaks of block ids, never of addresses. Only readers write, and only into their own blocks.
All methods but `expect` and `forget` (any thread, never block) may block for as long as a copy takes: they belong
in the transfer thread (`transfer/pulls/puller.py`), never on an event loop or in the engine's step.

Reasons of failures are a closed set: `pdserve.reasons.TransferReason`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, NewType, Protocol

import msgspec
import torch

from pdserve.ids import GenerationId, KvSignature, Nonce, WorkerId
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef

Handle = NewType("Handle", int)
"""Names one READ of one transport."""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a peer must know to READ this worker's blocks with one backend. Travels in the registration."""

    backend: str
    """Name of the transport that can READ it: nixl or tcp; a newer peer may announce another."""
    worker_id: WorkerId
    generation: GenerationId
    num_blocks: int
    block_bytes: int
    kv_signature: KvSignature
    payload: bytes
    """What its backend alone understands: NIXL agent metadata and base address; TCP host and port."""
    checksum: bytes = b""
    """BLAKE2b-128 over all fields above: checked before anything is handed to native code."""

    @property
    def peer(self) -> WorkerRef:
        """Whose blocks these are."""
        return WorkerRef(self.worker_id, self.generation)


class PullState(enum.Enum):
    """How a READ ended."""

    DONE = "done"
    FAILED = "failed"


class PullResult(NamedTuple):
    """How one READ ended, reported once by `poll`."""

    handle: Handle
    state: PullState
    reason: TransferReason | None = None
    """Why it failed; None: it did not."""
    is_terminal: bool = True
    """Whether the backend can prove that no byte of the local blocks will change any more."""
    detail: str = ""
    """The backend's own words on a failure, for the log."""


class Transport(Protocol):
    """One backend on one worker.

    Guarantees for every implementation (one contract suite tests them):

    - A DONE pull has copied exactly the remote blocks' bytes; no other local byte changed.
    - A failed or aborted pull is *terminal* only when nothing can write its local blocks any more; otherwise
      its blocks are quarantined until `poll` reports it terminal or the transport was closed.
    - After `close` returns no byte of the block pool changes by a peer's or an old READ's doing.
    - A peer that dies, freezes or was replaced never blocks other peers, and never kills this process
      (but for the hazard of NIXL over plain TCP, see docs).
    """

    name: str

    def register(
        self, kv_cache: torch.Tensor, worker_id: WorkerId, generation: GenerationId, kv_signature: KvSignature
    ) -> Descriptor:
        """Make a block pool `[num_blocks, …]` (contiguous) readable by peers; called once."""
        ...

    def another_reader(self) -> Transport | None:
        """A second active side over the same blocks, for another transfer thread; its descriptor is never announced.

        None where it would gain nothing, since no READ is copied by the thread that posts it.

        Raises:
            TransferError: reason lookup: the backend works, but not a second time.
        """
        ...

    def expect(self, nonce: Nonce, block_ids: list[int]) -> None:
        """Passive side: a hand-off with this nonce may read these blocks (adds to those already allowed)."""
        ...

    def forget(self, nonce: Nonce) -> None:
        """Passive side: the hand-off is over, its nonce reads nothing any more."""
        ...

    def start_connect(self, descriptor: Descriptor) -> None:
        """Active side: begin to get ready to READ from a peer; again for a known peer: nothing.

        Never waits for the peer: `is_connected` tells when it answered. Another generation of the same worker
        id, and another agent of the same generation, are disconnected first. After a failure it tries anew.

        Raises:
            IncompatibleError: KV signature or block size differ.
            TransferError: descriptor damaged.
        """
        ...

    def is_connected(self, peer: WorkerRef) -> bool:
        """Whether a wire-up READ has come back from a peer; False while it is still awaited.

        Raises:
            TransferError: unknown peer, unreachable, or no answer in time (reason connect or generation).
        """
        ...

    def pull(
        self, peer: WorkerRef, nonce: Nonce, remote_ids: list[int], local_ids: list[int], deadline_s: float
    ) -> Handle:
        """Start READing remote blocks into local ones; returns a handle for `poll`.

        `deadline_s` is on the local monotonic clock; after it `poll` reports a failure with reason timeout.

        Raises:
            TransferError: the peer is not connected, or the READ could not be posted.
        """
        ...

    def poll(self) -> list[PullResult]:
        """Pulls that ended since the last call, and quarantined ones that became terminal."""
        ...

    def abort(self, handle: Handle) -> bool:
        """Give a READ up. True: it is terminal now; False: its blocks stay quarantined until `poll` says so."""
        ...

    def disconnect(self, peer: WorkerRef) -> None:
        """Drop a peer; its active READs fail with reason disconnected."""
        ...

    def recreate(self) -> Descriptor:
        """Tear the active side down and build it anew: a fence for all READs, every one of them is terminal now.

        All peers must be connected again. The returned descriptor may differ from the one before; the worker
        then announces it, and peers that hold the old one fail to connect until they see it.
        """
        ...

    def serve(self) -> None:
        """Passive side: make progress for peers' READs; called about every millisecond while leases exist."""
        ...

    def close(self) -> None:
        """Tear everything down: a fence for all READs of this worker."""
        ...
