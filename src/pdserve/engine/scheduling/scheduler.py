"""Continuous batching: which sequences compute which tokens in the next step. Never sees a tensor or a bus.

One step, in order: (1) every running sequence that decodes gets its one token; one that lacks a block lets a
worse-ranked sequence be preempted, or sits this step out. (2) What is left of the token budget is shared among
prompts, those being computed and those waiting alike; a waiting one is admitted when all blocks of its tokens
are taken. One that does not fit is passed over, until it has aged: then no other overtakes it.

The budget is tokens, and seconds where step times are known (`step_targets.py`). Prompts are served by least remaining
time, so that short ones do not wait for long ones; half of each step belongs to the *guaranteed* prompt, so that long
ones do not wait for short ones for ever.

Preemption is by recompute: blocks are given back (and stay findable in the prefix cache), the sequence waits
with all its tokens and loses none.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from pdserve.engine.kv.block_tables import BlockTables
from pdserve.engine.scheduling.fairness import (
    choose_victim,
    guaranteed_prompt,
    has_aged,
    prefill_order,
    protection_order,
)
from pdserve.engine.scheduling.sharing import StepBudget, share_budget, share_or_sit_out
from pdserve.engine.scheduling.step_targets import StepTargets, prompt_budget
from pdserve.engine.scheduling.step_time import PromptTime, StepTime, StepWork, num_pairs
from pdserve.engine.sequence import Sequence
from pdserve.errors import NoCapacityError, SettingError
from pdserve.reasons import SequenceState

NO_TARGETS, UNKNOWN_TIME = StepTargets(), StepTime()
UNIT_TIME = PromptTime(0.0, 1.0, 0.0)
"""Counts remaining time in tokens, as long as their duration is not known."""


@dataclass(slots=True)
class Schedule:
    """One step's work; each sequence's share is its `num_scheduled_tokens`."""

    sequences: list[Sequence] = field(default_factory=list)
    """Sequences with a part in the step, decoding ones first."""
    started: list[Sequence] = field(default_factory=list)
    """Admitted for the first time."""
    preempted: list[Sequence] = field(default_factory=list)
    num_stalled: int = 0
    """Decoding sequences that found neither a block nor a victim; they keep what they have."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(sequence.num_scheduled_tokens for sequence in self.sequences)


class Scheduler:
    """The waiting queue and the running set.

    Args:
        tables: gives and takes blocks.
        max_num_seqs: sequences that run at once, and decode in one step.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`.
        max_wait_s: age after which a sequence goes first and no other overtakes it.
        watermark_blocks: blocks that an admission leaves for the growth of running sequences.
        targets: how long a step may take.
    """

    def __init__(
        self,
        tables: BlockTables,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_wait_s: float,
        watermark_blocks: int,
        targets: StepTargets = NO_TARGETS,
    ) -> None:
        if max_num_seqs < 1:
            raise SettingError("MAX_NUM_SEQS", max_num_seqs, "at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise SettingError(
                "MAX_NUM_BATCHED_TOKENS", max_num_batched_tokens, f"at least MAX_NUM_SEQS={max_num_seqs}"
            )
        self.tables = tables
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_wait_s = max_wait_s
        self.watermark_blocks = watermark_blocks
        self.targets = targets
        self.max_scored_tokens = max_num_batched_tokens
        """Tokens of prompts in one step whose log-probabilities are wanted; the engine knows how large logits are."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """In the order of admission."""
        self._last_victim: Sequence | None = None
        self._sat_out: Sequence | None = None
        """The guaranteed prompt, if it had no part in the last step."""
        self._in_flight: set[bytes] = set()
        """Chain hashes of blocks that running sequences are about to compute; of the current step."""

    @property
    def num_waiting_tokens(self) -> int:
        """Uncomputed prompt tokens, queued or being computed."""
        running = sum(s.num_uncomputed_tokens for s in self.running if s.num_uncomputed_tokens > 1)
        return running + sum(sequence.num_uncomputed_tokens for sequence in self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that owns no blocks."""
        assert not sequence.block_table, f"{sequence.key} owns blocks"
        sequence.state = SequenceState.WAITING
        self.waiting.append(sequence)

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Run a sequence whose blocks and KV came from elsewhere."""
        sequence.admitted_s = now_s  # first: another thread reads it of running sequences
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its blocks are the caller's business."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        if sequence is self._last_victim:
            self._last_victim = None
        if sequence is self._sat_out:
            self._sat_out = None

    def admits_newcomers(self, now_s: float) -> bool:
        """Whether a hand-off may take blocks now: not before preempted or aged sequences."""
        return not any(s.num_preemptions > 0 or has_aged(s, now_s, self.max_wait_s) for s in self.waiting)

    def schedule(self, now_s: float, time: StepTime = UNKNOWN_TIME) -> Schedule:
        """Plan the next step: blocks are taken, `num_scheduled_tokens` set, states changed.

        Args:
            time: how long steps take, as far as known.
        """
        plan = Schedule()
        for sequence in self.running:
            sequence.num_scheduled_tokens = 0
        self._schedule_decodes(plan)
        # Under pressure no sequence is admitted: the blocks belong to those that run already.
        is_under_pressure = bool(plan.preempted) or plan.num_stalled > 0
        self._schedule_prefills(plan, now_s, time, may_admit=not is_under_pressure)
        return plan

    # --- (1) decoding sequences

    def _schedule_decodes(self, plan: Schedule) -> None:
        order = protection_order(self.running)
        for index, sequence in enumerate(order):
            if len(plan.sequences) == self.max_num_seqs:
                return
            if sequence.state is not SequenceState.RUNNING or sequence.num_uncomputed_tokens != 1:
                continue
            if self._make_room(sequence, order[index + 1 :], plan, is_oldest=index == 0):
                sequence.num_scheduled_tokens = 1
                plan.sequences.append(sequence)
            else:
                plan.num_stalled += 1

    def _make_room(self, sequence: Sequence, others: list[Sequence], plan: Schedule, *, is_oldest: bool) -> bool:
        """Find the block for one more token, if need be by preempting one of those that rank behind."""
        while True:
            try:
                self.tables.grow(sequence, sequence.num_computed_tokens + 1)
            except NoCapacityError:
                candidates = [other for other in others if other.state is SequenceState.RUNNING]
                victim = choose_victim(candidates, self._last_victim, self.tables.num_yielded, may_repeat=is_oldest)
                if victim is None:
                    return False
                self._preempt(victim, plan)
            else:
                return True

    def _preempt(self, victim: Sequence, plan: Schedule) -> None:
        assert victim.num_scheduled_tokens == 0, f"{victim.key} is part of this step"
        self.tables.give_back(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.running.remove(victim)
        self.add(victim)
        self._last_victim = victim
        plan.preempted.append(victim)

    # --- (2) prompts

    def _schedule_prefills(self, plan: Schedule, now_s: float, time: StepTime, *, may_admit: bool) -> None:
        num_tokens = self.max_num_batched_tokens - len(plan.sequences)
        computing = [s for s in self.running if s.num_uncomputed_tokens > 1]
        may_admit = may_admit and len(self.running) < self.max_num_seqs and num_tokens > 0
        waiting = self.waiting if may_admit else []
        candidates = [*computing, *waiting]
        if not candidates:
            self._sat_out = None
            return
        self._in_flight = self._hashes_in_flight(computing) if waiting else set()
        budget = prompt_budget(self.targets, time, work_of(plan.sequences), num_tokens)
        self._sat_out, grants = self._admit_and_share(candidates, budget, time.prompt or UNIT_TIME, plan, now_s)
        for sequence, num_granted in grants:
            # Less than its share, when the prefix it was counted with was evicted by a neighbour's admission.
            sequence.num_scheduled_tokens = min(num_granted, sequence.num_uncomputed_tokens)
            plan.sequences.append(sequence)
        self._bound_logits([sequence for sequence, _ in grants if sequence.is_scored])

    def _bound_logits(self, scored: list[Sequence]) -> None:
        """Cut the chunks of prompts that are scored: each of their tokens makes logits."""
        for sequence in scored:
            most = max(1, self.max_scored_tokens // len(scored))
            sequence.num_scheduled_tokens = min(sequence.num_scheduled_tokens, most)

    def _admit_and_share(
        self, candidates: list[Sequence], budget: StepBudget, time: PromptTime, plan: Schedule, now_s: float
    ) -> tuple[Sequence | None, list[tuple[Sequence, int]]]:
        """Share the budget and admit those with a share; the share of one that does not fit is given away again.

        Returns:
            The prompt that sits out, if one does; tokens of each prompt in the step.
        """
        while candidates:
            guaranteed = guaranteed_prompt(candidates, now_s, self.max_wait_s)
            candidates, sits_out, grants = self._divide(candidates, budget, time, guaranteed)
            passed_over = self._admit_granted(candidates, grants, guaranteed, plan, now_s)
            if not passed_over:
                pairs = [pair for pair in zip(candidates, grants, strict=True) if pair[1] > 0]
                return (guaranteed if sits_out else None), pairs
            candidates = [sequence for sequence in candidates if id(sequence) not in passed_over]
        return None, []

    def _divide(
        self, candidates: list[Sequence], budget: StepBudget, time: PromptTime, guaranteed: Sequence
    ) -> tuple[list[Sequence], bool, list[int]]:
        """Share a step among candidates.

        Returns:
            The candidates, first served first; whether the guaranteed prompt sits out; tokens of each.
        """
        wanted = {id(sequence): self._num_uncached(sequence) for sequence in candidates}
        chunks = {id(s): (s.num_tokens - wanted[id(s)], wanted[id(s)]) for s in candidates}
        order = prefill_order(candidates, lambda sequence: time.seconds(*chunks[id(sequence)]))
        prompts = [chunks[id(sequence)] for sequence in order]
        budget = dataclasses.replace(budget)  # each try has all of it
        if guaranteed.state is SequenceState.RUNNING and guaranteed is not self._sat_out:
            return order, *share_or_sit_out(prompts, budget, order.index(guaranteed))
        return order, False, share_budget(prompts, budget, order.index(guaranteed))

    def _admit_granted(
        self, candidates: list[Sequence], grants: list[int], guaranteed: Sequence, plan: Schedule, now_s: float
    ) -> set[int]:
        """Admit those with a share: guaranteed, then aged, then other ones. Returns (by id) those that could not be."""

        def rank(sequence: Sequence) -> tuple[bool, float]:
            is_aged = has_aged(sequence, now_s, self.max_wait_s)
            return (sequence is not guaranteed, sequence.arrival_s if is_aged else math.inf)

        is_blocked, passed_over = False, set()
        granted = [s for s, num_tokens in zip(candidates, grants, strict=True) if num_tokens > 0]
        for sequence in sorted((s for s in granted if s.state is not SequenceState.RUNNING), key=rank):
            if is_blocked or not self._admit(sequence, plan, now_s):
                passed_over.add(id(sequence))
                is_blocked |= has_aged(sequence, now_s, self.max_wait_s)
        return passed_over

    def _num_uncached(self, sequence: Sequence) -> int:
        """Tokens to compute, prefix hits taken off."""
        if sequence.state is SequenceState.RUNNING:
            return sequence.num_uncomputed_tokens
        hits = self.tables.find_prefix(sequence, sequence.max_cached_tokens)
        return sequence.num_tokens - len(hits) * self.tables.block_size

    def _admit(self, sequence: Sequence, plan: Schedule, now_s: float) -> bool:
        """Take all blocks of the sequence's tokens and let it run; False: not now, nothing was taken."""
        if len(self.running) >= self.max_num_seqs:
            return False
        # The last token is computed in any case: its logits are what admission is for.
        hits = self.tables.find_prefix(sequence, sequence.max_cached_tokens)
        if self._waits_for_prefix(sequence, len(hits), now_s):
            return False
        num_blocks = self.tables.num_blocks_for(sequence.num_tokens)
        if not self.tables.fits(num_blocks, hits, self._headroom(sequence)):
            return False
        self.tables.take(sequence, hits, num_blocks)
        self.waiting.remove(sequence)
        sequence.num_computed_tokens = len(hits) * self.tables.block_size
        if sequence.admitted_s is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            plan.started.append(sequence)
        self.resume(sequence, now_s)
        self._in_flight |= self._hashes_in_flight([sequence])
        return True

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks that must stay available after an admission."""
        if not self.running or sequence.is_prefill_only:
            return 0
        if sequence is self._last_victim and len(self.running) == 1:
            # Beside one other it could only be the victim again: it comes back once both can grow to their ends.
            return self.watermark_blocks + self._num_growth_blocks(sequence) + self._num_growth_blocks(self.running[0])
        # One that was preempted comes back only when it would not be the next victim at once.
        return max(self.watermark_blocks, len(self.running) if sequence.num_preemptions else 0)

    def _num_growth_blocks(self, sequence: Sequence) -> int:
        """Blocks beyond those of its present tokens that the sequence needs to reach its last one."""
        num_left = max(0, sequence.sampling.max_tokens - sequence.next_output_index)
        num_blocks = self.tables.num_blocks_for
        return num_blocks(sequence.num_tokens + num_left) - num_blocks(sequence.num_tokens)

    def _waits_for_prefix(self, sequence: Sequence, num_hits: int, now_s: float) -> bool:
        """Whether its next prefix block is being computed by another sequence right now."""
        if (num_hits + 1) * self.tables.block_size > sequence.max_cached_tokens:
            return False
        if not self._in_flight or has_aged(sequence, now_s, self.max_wait_s):
            return False
        return self.tables.chain_hashes(sequence, num_hits + 1)[num_hits] in self._in_flight

    def _hashes_in_flight(self, computing: list[Sequence]) -> set[bytes]:
        if not self.tables.is_cache_on:
            return set()
        block_size = self.tables.block_size
        return {
            chain_hash
            for sequence in computing
            if sequence.is_cacheable
            for chain_hash in self.tables.chain_hashes(sequence, sequence.num_tokens // block_size)[
                sequence.num_computed_tokens // block_size :
            ]
        }


def work_of(sequences: list[Sequence]) -> StepWork:
    """What the scheduled tokens of a step are, before it has run."""
    num_decodes = num_context = num_prompt = 0
    pairs = 0.0
    for sequence in sequences:
        if sequence.num_uncomputed_tokens == 1:
            num_decodes += 1
            num_context += sequence.num_tokens
        else:
            num_prompt += sequence.num_scheduled_tokens
            pairs += num_pairs(sequence.num_computed_tokens, sequence.num_scheduled_tokens)
    return StepWork(num_decodes, num_context, num_prompt, pairs)
