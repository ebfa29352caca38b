"""KV leases: blocks of a prompt stay here until a decode worker has READ them. Knows holders; never a clock or a peer.

When a lease expires is the prefill worker's business (`prefill_worker/leases.py`).
"""

from __future__ import annotations

from pdserve.engine.kv.block_pool import BlockPool, BlockState, Holder
from pdserve.engine.kv.block_tables import holder_of
from pdserve.engine.sequence import Sequence
from pdserve.messages import AttemptKey
from pdserve.reasons import SequenceState


class Leases:
    """The blocks that one engine keeps for decode workers, by attempt."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._computed: dict[AttemptKey, Sequence] = {}
        """Sequences with nothing left to compute, which exist only for their lease."""

    def grant(self, sequence: Sequence) -> None:
        """Pin all blocks of a running or computed sequence; blocks that its lease has already are left alone."""
        holder = holder_of(sequence, BlockState.LEASED)
        listed = set(self._pool.blocks_of(holder))
        self._pool.share(holder, [block_id for block_id in sequence.block_table if block_id not in listed])

    def keep(self, sequence: Sequence) -> None:
        """Turn what a computed prompt owns into its lease; RUNNING → LEASED."""
        self.grant(sequence)
        self._pool.release(holder_of(sequence, BlockState.OWNED))
        sequence.state = SequenceState.LEASED
        self._computed[sequence.key] = sequence

    def release(self, key: AttemptKey) -> None:
        """Give a lease's blocks back; LEASED → FINISHED. An unknown attempt changes nothing."""
        self._pool.release(Holder(BlockState.LEASED, str(key)))
        sequence = self._computed.pop(key, None)
        if sequence is not None:
            sequence.state = SequenceState.FINISHED
            sequence.block_table = []
