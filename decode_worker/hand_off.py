"""One hand-off, seen from the decode side: which blocks were announced, read and verified, and is token 0 here.

Announcements may be lost, doubled or reordered; a block is read once, whatever arrives. Leading blocks that
this worker's own prefix cache supplied are never read. Pure: no engine, bus, clock or transport.

    reserved → (announced → reading → received)* + token 0 → complete
                                     └→ failed → (READs terminal) → local prefill or give up
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.sequence import Sequence
from pdserve.errors import TransferError
from pdserve.messages import KvReady, LeaseItem, TokenLogprobs
from pdserve.reasons import FailReason, TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor
from pdserve.transfer.digest import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Blocks to READ now, in table order."""

    indices: list[int]
    remote_ids: list[int]
    local_ids: list[int]
    digests: list[bytes]
    """Parallel to the ids, or empty."""


@dataclass(slots=True, eq=False)
class HandOff:
    """State of one hand-off on the decode side."""

    sequence: Sequence
    descriptor: Descriptor
    """How the prefill worker's blocks are read."""
    block_size: int
    num_cached_blocks: int
    """Leading blocks of our own prefix cache: not read."""
    chain_hashes: list[bytes]
    """Expected, one per full prompt block, from our own copy of the prompt."""
    progress_s: float
    """Local monotonic time of the last announcement or received block."""
    token0: int | None = None
    token0_logprobs: TokenLogprobs | None = None
    failure: FailReason | None = None
    """Set once: no block is read any more."""
    is_peer_lost: bool = False
    """The prefill worker is gone or gave up: token 0 will not come any more."""
    first_read_s: float | None = None
    last_read_s: float | None = None
    num_bytes: int = 0
    reads: dict[int, list[int]] = field(default_factory=dict)
    """READ ticket → block indices, until no byte can change any more."""
    _announced: set[int] = field(default_factory=set)
    _received: set[int] = field(default_factory=set)

    @property
    def peer(self) -> WorkerRef:
        """The prefill worker process that is read from."""
        return self.descriptor.peer

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt, the last one possibly partial."""
        return -(-self.sequence.num_prompt_tokens // self.block_size)

    @property
    def num_announced_blocks(self) -> int:
        """Leading blocks that were announced without a gap."""
        count = 0
        while count in self._announced:
            count += 1
        return count

    @property
    def is_complete(self) -> bool:
        """Every block is here and verified, and token 0 is known."""
        num_missing = self.num_blocks - self.num_cached_blocks - len(self._received)
        return self.failure is None and self.token0 is not None and num_missing == 0

    @property
    def transfer_s(self) -> float:
        """Seconds between the first READ posted and the last READ verified; 0 before that."""
        if self.first_read_s is None or self.last_read_s is None:
            return 0.0
        return self.last_read_s - self.first_read_s

    def announce(self, message: KvReady) -> BlockRead | None:
        """Note an announcement; returns the blocks that have to be read now.

        Raises:
            TransferError: reason verify: the prompt on the other side is not ours (chain hashes differ), or
                reason geometry: the announcement does not fit the prompt.
        """
        end = message.first_block_index + len(message.block_ids)
        if message.first_block_index < 0 or end > self.num_blocks:
            raise TransferError(
                TransferReason.GEOMETRY, f"blocks [{message.first_block_index}, {end}) of {self.num_blocks}"
            )
        if message.digests and len(message.digests) != len(message.block_ids):
            raise TransferError(
                TransferReason.GEOMETRY, f"{len(message.digests)} digests for {len(message.block_ids)} blocks"
            )
        if wrong := [len(digest) for digest in message.digests if len(digest) != DIGEST_BYTES]:
            raise TransferError(TransferReason.GEOMETRY, f"a digest of {wrong[0]} bytes, not {DIGEST_BYTES}")
        num_full = min(end, len(self.chain_hashes))
        if num_full and message.chain_hash != self.chain_hashes[num_full - 1]:
            raise TransferError(TransferReason.VERIFY, "the offered blocks belong to another prompt")
        if message.is_last and self.token0 is None:
            self.token0, self.token0_logprobs = message.token0, message.token0_logprobs
        fresh = [
            offset
            for offset in range(len(message.block_ids))
            if message.first_block_index + offset not in self._announced
        ]
        self._announced.update(message.first_block_index + offset for offset in fresh)
        wanted = [offset for offset in fresh if message.first_block_index + offset >= self.num_cached_blocks]
        if not wanted or self.failure is not None:
            return None
        indices = [message.first_block_index + offset for offset in wanted]
        return BlockRead(
            indices=indices,
            remote_ids=[message.block_ids[offset] for offset in wanted],
            local_ids=[self.sequence.block_table[index] for index in indices],
            digests=[message.digests[offset] for offset in wanted] if message.digests else [],
        )

    def received(self, ticket: int, num_bytes: int, now_s: float) -> None:
        """A READ is done and verified."""
        self._received.update(self.reads.pop(ticket))
        self.num_bytes += num_bytes
        self.last_read_s = self.progress_s = now_s

    def lease_item(self) -> LeaseItem:
        """This hand-off's line in a lease renewal."""
        return LeaseItem(
            **self.sequence.key._asdict(),
            num_announced_blocks=self.num_announced_blocks,
            has_token0=self.token0 is not None,
        )
