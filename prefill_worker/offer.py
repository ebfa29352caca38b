"""One hand-off, seen from the prefill side: which finished blocks a decode worker has been told of.

An offer grows with every chunk. Once a decode worker wants it (KvWant), it is told of all finished blocks
at once and of each new chunk as it completes; the last announcement carries token 0. What was lost on the
way is announced again when a lease renewal shows the gap. Pure: no engine, bus, clock or tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.sequence import Sequence
from pdserve.messages import AttemptKey, KvReady, TokenLogprobs
from pdserve.registration import WorkerRef


@dataclass(slots=True)
class Reader:
    """The decode worker that wants this offer."""

    peer: WorkerRef
    num_announced_blocks: int = 0
    is_last_announced: bool = False


@dataclass(slots=True)
class Offer:
    """What a prefill worker can hand over of one sequence so far."""

    sequence: Sequence
    block_size: int
    chain_hashes: list[bytes]
    """One per full prompt block."""
    has_digests: bool
    """False with INTEGRITY=off: blocks are announced without digests."""
    num_ready_blocks: int = 0
    """Leading blocks whose KV is complete on the device."""
    digests: list[bytes] = field(default_factory=list)
    token0: int | None = None
    token0_logprobs: TokenLogprobs | None = None
    reader: Reader | None = None
    is_over: bool = False
    """The attempt ended here (cancelled, failed), though a reader may still be reading."""

    @property
    def key(self) -> AttemptKey:
        """The attempt whose blocks these are."""
        return self.sequence.key

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt, the last one possibly partial."""
        return -(-self.sequence.num_prompt_tokens // self.block_size)

    @property
    def num_announceable_blocks(self) -> int:
        """Ready blocks whose digests are known too."""
        return min(self.num_ready_blocks, len(self.digests)) if self.has_digests else self.num_ready_blocks

    def advance(self, num_computed_tokens: int) -> None:
        """A chunk is complete: its full blocks are ready, and the partial last one with the end of the prompt."""
        if num_computed_tokens >= self.sequence.num_prompt_tokens:
            self.num_ready_blocks = self.num_blocks
        else:
            self.num_ready_blocks = max(self.num_ready_blocks, num_computed_tokens // self.block_size)

    def blocks_without_digest(self) -> list[int]:
        """Ids of ready blocks whose digest is still to be computed, in table order."""
        return self.sequence.block_table[len(self.digests) : self.num_ready_blocks] if self.has_digests else []

    def rewind(self, num_announced_blocks: int, has_token0: bool) -> None:
        """A lease renewal tells what the reader really has: announce the rest again."""
        if self.reader is None:
            return
        self.reader.num_announced_blocks = min(self.reader.num_announced_blocks, num_announced_blocks)
        if not has_token0:
            self.reader.is_last_announced = False

    def next_announcement(self, offerer: WorkerRef) -> KvReady | None:
        """What the reader does not know yet, as said by `offerer`; None when it knows everything that is ready."""
        reader = self.reader
        if reader is None or self.is_over:
            return None
        first, end = reader.num_announced_blocks, self.num_announceable_blocks
        is_last = end == self.num_blocks and self.token0 is not None
        if first == end and (not is_last or reader.is_last_announced):
            return None
        reader.num_announced_blocks = end
        reader.is_last_announced = is_last
        num_full = min(end, len(self.chain_hashes))
        return KvReady(
            **self.sequence.key._asdict(),
            **offerer._asdict(),
            first_block_index=first,
            block_ids=self.sequence.block_table[first:end],
            digests=self.digests[first:end] if self.has_digests else [],
            chain_hash=self.chain_hashes[num_full - 1] if num_full else b"",
            is_last=is_last,
            token0=self.token0 if is_last else None,
            token0_logprobs=self.token0_logprobs if is_last else None,
        )
