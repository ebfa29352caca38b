"""Sequences whose prompt was computed elsewhere, from the reservation of their blocks to the arrival of the KV.

The scheduler does not know them yet, but they count as part of the decode batch that they will join. Never copies
anything: `transfer/` does, into the blocks reserved here.
"""

from __future__ import annotations

from pdserve.engine.kv.block_pool import BlockState
from pdserve.engine.kv.block_tables import holder_of
from pdserve.engine.scheduling.admission import HandOffGate, decode_batch_of
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.step_targets import num_admissible
from pdserve.engine.scheduling.step_time import DecodeTime, StepWork
from pdserve.engine.sequence import Sequence
from pdserve.errors import NoCapacityError
from pdserve.messages import AttemptKey
from pdserve.reasons import SequenceState


class Receiving:
    """The receiving sequences of one engine.

    Args:
        scheduler: what runs and waits beside them; its block tables, watermark and step targets count here too.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._tables = scheduler, scheduler.tables
        self._gate = HandOffGate(scheduler.targets, scheduler.max_wait_s)
        self._sequences: dict[AttemptKey, Sequence] = {}

    def sequences(self) -> list[Sequence]:
        """The receiving sequences, in the order of their reservation. Any thread."""
        return list(self._sequences.values())

    def can_join(self, time: DecodeTime | None) -> bool:
        """Whether one more sequence like those here could decode within the target step time. Any thread.

        Args:
            time: duration of a decode step, as measured; None while it is unknown.
        """
        decode_batch = self._decode_batch()
        mean_tokens = decode_batch.num_context_tokens / max(1, decode_batch.num_sequences)
        return num_admissible(self._scheduler.targets, time, decode_batch, mean_tokens) >= 1

    def reserve(self, sequence: Sequence, time: DecodeTime | None, now_s: float) -> int:
        """Take all blocks of a prompt and one more; WAITING → RECEIVING. Own prefix hits are pinned.

        Hand-offs never overtake preempted or aged sequences, and leave the watermark.

        Args:
            sequence: one that could finish if it had the block pool to itself.
            time: duration of a decode step, as measured; None while it is unknown.
            now_s: monotonic.

        Returns:
            Number of leading blocks that are cached here and need no READ.

        Raises:
            NoCapacityError: not now; nothing was taken.
        """
        if not self._scheduler.admits_newcomers(now_s):
            raise NoCapacityError("preempted or long waiting sequences come first")
        self._gate.check(sequence, self._decode_batch(), time, now_s)
        tables, pool = self._tables, self._tables.pool
        hits = tables.find_prefix(sequence, sequence.num_prompt_tokens)
        num_blocks = min(tables.num_blocks_for(sequence.num_prompt_tokens) + 1, pool.num_blocks)
        is_alone = not (self._scheduler.running or self._sequences)
        headroom = 0 if is_alone else self._scheduler.watermark_blocks
        if not tables.fits(num_blocks, hits, headroom):
            raise NoCapacityError(
                f"{num_blocks} KV blocks wanted beyond a watermark of {headroom}, {pool.num_available} available"
            )
        tables.take(sequence, hits, num_blocks, fresh_kind=BlockState.RECEIVING)
        sequence.state = SequenceState.RECEIVING
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(hits) * tables.block_size
        self._sequences[sequence.key] = sequence
        return len(hits)

    def complete(self, sequence: Sequence, *, is_chain_proven: bool) -> None:
        """Make received blocks the sequence's own, and findable in the prefix cache if their content is proven."""
        self._leave(sequence)
        num_known = sequence.num_computed_tokens
        self._tables.pool.move(holder_of(sequence, BlockState.RECEIVING), holder_of(sequence, BlockState.OWNED))
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        sequence.is_cacheable = sequence.is_cacheable and is_chain_proven
        self._tables.remember(sequence, num_known)

    def drop(self, sequence: Sequence, *, quarantine: bool) -> None:
        """Give up on the KV of a sequence: its received blocks are released, or quarantined until no READ writes them.

        The prefix hits stay the sequence's own.
        """
        self._leave(sequence)
        received, pool = holder_of(sequence, BlockState.RECEIVING), self._tables.pool
        if quarantine:
            pool.move(received, holder_of(sequence, BlockState.QUARANTINED))
        else:
            pool.release(received)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.state is SequenceState.RECEIVING, f"{sequence.key} is {sequence.state}, not receiving"
        del self._sequences[sequence.key]

    def _decode_batch(self) -> StepWork:
        """The step in which all running and receiving sequences decode."""
        return decode_batch_of([*self._scheduler.running, *self._sequences.values()])
