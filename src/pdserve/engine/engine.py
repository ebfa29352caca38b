"""The engine: sequences in, tokens out. One loop for both roles: schedule, run, sample, update.

Touched by one thread. Never sees a bus, a transport, or any clock but the injected one. A role is a policy:
a prefill-only sequence ends with token 0 and leaves its blocks under a lease; a decode-side sequence starts
with reserved blocks (`reserve`), whose KV comes from elsewhere (`activate`) or, when that fails, is computed
here (`recompute`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pdserve.engine.executors.base import MAX_SCORED_LOGITS_BYTES, Executor, SequenceSlice
from pdserve.engine.fits import check_fits_ever
from pdserve.engine.kv.block_pool import BlockPool, BlockState, Holder, LedgerReport
from pdserve.engine.kv.block_tables import holder_of
from pdserve.engine.kv.leases import Leases
from pdserve.engine.receiving import Receiving
from pdserve.engine.sampling.sampler import SampledToken, sample
from pdserve.engine.sampling.stop import check_stop
from pdserve.engine.scheduling.scheduler import Schedule, Scheduler, work_of
from pdserve.engine.scheduling.step_time import StepTimeModel
from pdserve.engine.scoring import Scores, score_prompts
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_output import StepOutput
from pdserve.messages import AttemptKey, TokenLogprobs
from pdserve.reasons import SequenceState

__all__ = ["Engine", "StepOutput"]


class Engine:
    """Runs sequences on one executor and one block pool.

    Args:
        executor: runs the model; its KV cache is allocated here, as large as the scheduler's block pool.
        scheduler: plans the steps; its block tables are the engine's too.
        eos_token_ids: every id that ends a sequence by itself.
        clock: monotonic seconds.
    """

    def __init__(
        self, executor: Executor, scheduler: Scheduler, *, eos_token_ids: frozenset[int], clock: Callable[[], float]
    ) -> None:
        assert scheduler.tables.block_size == executor.kv_spec.block_size, (scheduler.tables.block_size, executor.name)
        self.executor = executor
        self.scheduler = scheduler
        scheduler.max_scored_tokens = max(1, MAX_SCORED_LOGITS_BYTES // (4 * executor.vocab_size))
        self.tables = scheduler.tables
        self.eos_token_ids = eos_token_ids
        self.step_time = StepTimeModel()
        """Learns from the steps that succeeded."""
        self.kv_cache: Tensor = executor.allocate_kv_cache(self.block_pool.num_blocks)
        self.sequences_in_step: list[Sequence] = []
        """Members of the step that runs, or of the one that failed last."""
        self.on_admitted: Callable[[Sequence], None] = lambda sequence: None
        """Called with each sequence that is admitted for the first time, before its first tokens are computed."""
        self._clock = clock
        self._receiving = Receiving(scheduler)
        self._leases = Leases(self.block_pool)

    @property
    def block_pool(self) -> BlockPool:
        """The ledger of all KV blocks."""
        return self.tables.pool

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.tables.block_size

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""
        return self.executor.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether there are sequences for a step to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def can_join_decode(self) -> bool:
        """Whether one more sequence like those here could decode within the target step time. Any thread."""
        return self._receiving.can_join(self.step_time.fit.decode)

    # --- arrivals

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that computes its prompt here.

        Raises:
            InvalidRequestError: it can never fit.
        """
        self._check_fits_ever(sequence)
        self.scheduler.add(sequence)

    def reserve(self, sequence: Sequence) -> int:
        """Take all blocks of a prompt whose KV comes from elsewhere, and one more; WAITING → RECEIVING.

        Own prefix hits are pinned. Hand-offs never overtake preempted or aged sequences, and leave the watermark.

        Returns:
            Number of leading blocks that are cached here and need no READ.

        Raises:
            InvalidRequestError: it can never fit.
            NoCapacityError: not now; nothing was taken.
        """
        self._check_fits_ever(sequence)
        return self._receiving.reserve(sequence, self.step_time.fit.decode, self._clock())

    def activate(
        self,
        sequence: Sequence,
        token0: int,
        token0_logprobs: TokenLogprobs | None,
        *,
        is_chain_proven: bool = True,
    ) -> StepOutput | None:
        """Run a reserved sequence, whose KV is here and verified, from token 0 on; RECEIVING → RUNNING.

        Args:
            sequence: a reserved one.
            token0: as sampled by the prefill worker; never sampled again.
            token0_logprobs: its log-probabilities, if they were asked for.
            is_chain_proven: whether the sender's chain hash equals ours; else no block of it is ever cached.

        Returns:
            What token 0 ended, as a step would tell it; None when the sequence runs on.
        """
        self._receiving.complete(sequence, is_chain_proven=is_chain_proven)
        self._append(sequence, token0)
        if sequence.finish_reason is not None:
            return self._finish_at_token0(sequence, token0, token0_logprobs)
        self.scheduler.resume(sequence, self._clock())
        return None

    def recompute(
        self,
        sequence: Sequence,
        token0: int,
        token0_logprobs: TokenLogprobs | None,
        *,
        quarantine: bool = False,
    ) -> StepOutput | None:
        """Compute a reserved prompt here, because its KV did not come though token 0 is known; RECEIVING → WAITING.

        Its blocks are given back. Arguments and result are those of `activate`, `quarantine` is that of `abort`.
        """
        self._receiving.drop(sequence, quarantine=quarantine)
        self.tables.give_back(sequence)
        sequence.num_computed_tokens = sequence.num_cached_tokens = 0
        self._append(sequence, token0)
        if sequence.finish_reason is not None:
            return self._finish_at_token0(sequence, token0, token0_logprobs)
        self.scheduler.add(sequence)
        return None

    # --- leases and endings

    def grant_lease(self, sequence: Sequence) -> None:
        """Pin all blocks of a running or computed sequence for a decode worker; a second time changes nothing."""
        self._leases.grant(sequence)

    def release_lease(self, key: AttemptKey) -> None:
        """Give back what a decode worker has READ, or a lease that expired; an unknown attempt changes nothing."""
        self._leases.release(key)

    def abort(self, sequence: Sequence, *, quarantine: bool = False) -> None:
        """End a sequence in any state, at once. An active lease stays until `release_lease`.

        Args:
            sequence: any; a finished one is left alone.
            quarantine: a READ may still write its received blocks: keep them until `release_quarantine`.
        """
        if sequence.state in (SequenceState.FINISHED, SequenceState.LEASED):
            return
        if sequence.state is SequenceState.RECEIVING:
            self._receiving.drop(sequence, quarantine=quarantine)
        self.scheduler.remove(sequence)
        self.tables.give_back(sequence)
        sequence.state = SequenceState.FINISHED

    def release_quarantine(self, key: AttemptKey) -> None:
        """Give back blocks that no READ of this attempt can write any more; an unknown attempt changes nothing."""
        self.block_pool.release(Holder(BlockState.QUARANTINED, str(key)))

    def chain_hashes(self, sequence: Sequence) -> list[bytes]:
        """Chain hashes of all full prompt blocks. For a sequence that the engine does not know yet: any thread."""
        return self.tables.chain_hashes(sequence, sequence.num_prompt_tokens // self.block_size)

    # --- the step

    def step(self) -> StepOutput:
        """Compute one batch; the output is empty when nothing can run now.

        Raises whatever the executor raises; `sequences_in_step` then names the sequences that it hit, and all of them
        are as they were before the step.
        """
        started_s = self._clock()
        plan = self.scheduler.schedule(started_s, self.step_time.fit)
        self.sequences_in_step = plan.sequences
        if not plan.sequences:
            return StepOutput(preempted=plan.preempted, num_stalled=plan.num_stalled)
        for sequence in plan.started:
            self.on_admitted(sequence)
        work = work_of(plan.sequences)
        batch = [_slice(sequence) for sequence in plan.sequences]
        logits = self.executor.run(batch)
        samplers = [sequence for sequence in plan.sequences if _samples(sequence)]
        scores: Scores = []
        if len(logits) > len(samplers):
            logits, scores = score_prompts(logits, batch)
        sampled = sample(logits, samplers, self.eos_token_ids)
        tokens = {id(s): token for s, token in zip(samplers, sampled, strict=True)}
        output = self._update(plan, tokens, scores, started_s)
        self.sequences_in_step = []
        self.step_time.note(work, output.duration_s)
        return output

    def check_integrity(self) -> LedgerReport:
        """Prove the KV ledger, and that sequences and ledger agree.

        Raises:
            LedgerError, AssertionError: with what disagrees.
        """
        for sequence in self.scheduler.running:
            held = self.block_pool.blocks_of(holder_of(sequence, BlockState.OWNED))
            assert held == sequence.block_table, f"{sequence.key} owns {held}, its table is {sequence.block_table}"
            assert len(held) * self.tables.block_size >= sequence.num_computed_tokens, f"{sequence.key}: {held}"
        owners = {str(s.key) for s in [*self.scheduler.running, *self._receiving.sequences()]}
        for holder in self.block_pool.holders():
            if holder.kind in (BlockState.OWNED, BlockState.RECEIVING):
                assert holder.name in owners, f"{holder} is neither running nor receiving"
        return self.block_pool.check_integrity()

    # --- inner workings

    def _check_fits_ever(self, sequence: Sequence) -> None:
        check_fits_ever(
            sequence,
            vocab_size=self.executor.vocab_size,
            max_model_len=self.executor.max_model_len,
            num_kv_tokens=self.block_pool.num_blocks * self.tables.block_size,
        )

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.output_token_ids.append(token_id)
        check_stop(sequence, self.eos_token_ids, self.executor.max_model_len)

    def _finish_at_token0(self, sequence: Sequence, token0: int, logprobs: TokenLogprobs | None) -> StepOutput:
        self._finish(sequence)
        return StepOutput(tokens=[(sequence, token0, logprobs)], finished=[sequence])

    def _finish(self, sequence: Sequence) -> None:
        self.tables.give_back(sequence)
        sequence.state = SequenceState.FINISHED

    def _update(self, plan: Schedule, sampled: dict[int, SampledToken], scores: Scores, started_s: float) -> StepOutput:
        num_tokens, num_decode_tokens = plan.num_tokens, sum(s.num_uncomputed_tokens == 1 for s in plan.sequences)
        progressed: list[Sequence] = []
        tokens: list[tuple[Sequence, int, TokenLogprobs | None]] = []
        finished: list[Sequence] = []
        for sequence, logprobs in scores:
            sequence.num_scored_tokens += len(logprobs)
        for sequence in plan.sequences:
            num_before = sequence.num_computed_tokens
            if num_before < sequence.num_prompt_tokens:
                progressed.append(sequence)
            sequence.num_computed_tokens += sequence.num_scheduled_tokens
            self.tables.remember(sequence, num_before)
            if (token := sampled.get(id(sequence))) is not None:
                self._append(sequence, token.token_id)
                tokens.append((sequence, token.token_id, token.logprobs))
                self._settle(sequence, finished)
        return StepOutput(
            started=plan.started,
            progressed=progressed,
            tokens=tokens,
            prompt_logprobs=scores,
            finished=finished,
            preempted=plan.preempted,
            num_tokens=num_tokens,
            num_decode_tokens=num_decode_tokens,
            num_stalled=plan.num_stalled,
            duration_s=self._clock() - started_s,
        )

    def _settle(self, sequence: Sequence, finished: list[Sequence]) -> None:
        """After a token: a sequence that ended, or only had a prompt to compute, leaves the scheduler."""
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)
            self._finish(sequence)
            finished.append(sequence)
        elif sequence.is_prefill_only:
            self.scheduler.remove(sequence)
            self._leases.keep(sequence)


def _samples(sequence: Sequence) -> bool:
    """Whether this step computes the sequence's last token, whose logits give the next one."""
    return sequence.num_scheduled_tokens == sequence.num_uncomputed_tokens


def _slice(sequence: Sequence) -> SequenceSlice:
    start = sequence.num_computed_tokens
    end = start + sequence.num_scheduled_tokens
    return SequenceSlice(
        token_ids=sequence.tokens(start, end),
        start=start,
        block_table=sequence.block_table,
        samples=_samples(sequence),
        tag=sequence,
        num_scored=min(end - start, max(0, end - sequence.max_cached_tokens)) if sequence.is_scored else 0,
    )
