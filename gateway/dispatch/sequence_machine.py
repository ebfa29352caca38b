"""The state machine of ONE sequence, over all its attempts. Pure: no clock, no bus, no choice of workers.

Methods take what happened and `now_s`, and return the actions that exchange.py performs in order.

    queued ──dispatch──> dispatched ──Started──> prefilling ──token 0──> handed_off ──decoded──> decoding ──> done
      ^                      │                       │                       │                       │
      └──────────────────────┴───────────────────────┴── Requeue: attempt+1 ─┴───────────────────────┘

- Tokens are idempotent by (sequence, attempt, index). What is behind is dropped, what is ahead is asked for again,
  and the same index with another token ends the attempt.
- Exactly one producer: only the current workers of the current attempt are heard; everything older is ignored.
- Exactly one end: finished, failed or cancelled.

This file is the way of a sequence whose workers do what they should; recovery.py is the rest.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable

from pdserve.errors import RequestError
from pdserve.gateway.dispatch import outcomes
from pdserve.gateway.dispatch.actions import (
    Action,
    Avoid,
    Diverged,
    Dropped,
    Emit,
    Fail,
    Requeue,
    Score,
    Send,
    WantDecode,
)
from pdserve.gateway.dispatch.attempt import Assignment, Attempt
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.generation.request import FinishedEvent, GenerationRequest, Sender, TokensEvent
from pdserve.ids import Nonce
from pdserve.messages import (
    AttemptKey,
    Cancel,
    Finished,
    PromptLogprobs,
    ResendTokens,
    SequenceKey,
    SequenceTokens,
    Started,
)
from pdserve.reasons import CancelReason, FailReason, FinishReason, Phase, SequenceState
from pdserve.registration import WorkerRef


class SequencePhase(enum.StrEnum):
    """Where a sequence is between the gateway's queue and its end; see the picture above."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    PREFILLING = "prefilling"
    HANDED_OFF = "handed_off"
    DECODING = "decoding"
    DONE = "done"


_LOST_IN = {SequencePhase.DECODING: Phase.DECODE, SequencePhase.HANDED_OFF: Phase.HANDOFF}
"""Phases after the prefill, as a re-dispatch is counted."""


class SequenceMachine:
    """One sequence from the queue to its end. `attempt` is None while it waits in the gateway."""

    def __init__(
        self,
        request: GenerationRequest,
        choice: int,
        sender: Sender,
        limits: RetryLimits,
        new_nonce: Callable[[], Nonce] = lambda: Nonce(secrets.token_hex(12)),
    ) -> None:
        self.request, self.sender, self.limits = request, sender, limits
        self.key = SequenceKey(request.request_id, choice)
        self.attempt: Attempt | None = None
        self.is_done = False
        self.output: list[int] = []
        """Every token emitted to the client, over all attempts."""
        self.num_scored = 1
        """Leading prompt tokens whose log-probabilities came, if they are wanted; the first one has none."""
        self.num_attempts = 0
        self.num_faults = 0
        """Attempts that ended by a fault: they count against max_attempts."""
        self.num_retries = 0
        self.num_running_deaths = 0
        self._new_nonce = new_nonce

    @property
    def phase(self) -> SequencePhase:
        """Where the sequence is now."""
        attempt = self.attempt
        if self.is_done or attempt is None:
            return SequencePhase.DONE if self.is_done else SequencePhase.QUEUED
        if attempt.decode is not None and attempt.decode.has_tokens:
            return SequencePhase.DECODING
        if attempt.token0_s is not None:
            return SequencePhase.HANDED_OFF
        return SequencePhase.PREFILLING if attempt.is_started else SequencePhase.DISPATCHED

    @property
    def lacks_scores(self) -> bool:
        """Whether log-probabilities of the prompt are missing: until they are here, no token is accepted."""
        return self.num_scored < self.request.num_scored_tokens and self.key.choice == 0

    @property
    def wants_decode(self) -> bool:
        """Whether a decode worker is to be chosen now."""
        attempt = self.attempt
        return (
            attempt is not None
            and attempt.prefill is not None
            and attempt.is_started
            and attempt.will_decode
            and attempt.decode is None
            and attempt.finish is None
        )

    # --- workers are chosen

    def dispatch(self, prefill: WorkerRef, now_s: float, epoch: int) -> list[Action]:
        """Start the next attempt with a prefill worker."""
        attempt = self._begin(now_s)
        attempt.prefill = Assignment(prefill, now_s, epoch, state=SequenceState.WAITING)
        return [Send(prefill, self.request.prefill_job(self.sender, attempt.key, self.output, now_s))]

    def dispatch_local(self, decode: WorkerRef, now_s: float, epoch: int) -> list[Action]:
        """Start the next attempt on a decode worker that computes the prompt itself."""
        attempt = self._begin(now_s)
        attempt.decode = Assignment(decode, now_s, epoch, state=SequenceState.WAITING)
        return [self.decode_job(now_s)]

    def assign_decode(self, decode: WorkerRef, now_s: float, epoch: int) -> list[Action]:
        """Bind the hand-off to a decode worker."""
        attempt = self.attempt
        assert attempt is not None, f"{self.key} is {self.phase}, no decode worker is wanted"
        assert self.wants_decode, f"{attempt.key} wants no decode worker"
        assert decode not in attempt.refused, f"{decode} had {attempt.key} before"
        attempt.decode = Assignment(decode, now_s, epoch, state=SequenceState.RECEIVING)
        attempt.last_progress_s = now_s
        return [self.decode_job(now_s)]

    def decode_job(self, now_s: float) -> Send:
        """The current attempt's job for its decode worker, as often as it has to be sent."""
        attempt = self.attempt
        assert attempt is not None, f"{self.key} has no attempt"
        assert attempt.decode is not None, f"{attempt.key} has no decode worker"
        prefill = attempt.prefill.worker if attempt.prefill is not None else None
        emitted = self.output[: attempt.first_index]
        return Send(attempt.decode.worker, self.request.decode_job(self.sender, attempt.key, emitted, prefill, now_s))

    # --- what workers say

    def on_started(self, message: Started, worker: WorkerRef, now_s: float) -> list[Action]:
        """The prefill worker has reserved the blocks: time to choose a decode worker."""
        holder = self.holder_of(message.key, worker)
        if holder is None or self.attempt is None or holder is not self.attempt.prefill:
            return []
        holder.is_seen = True
        return self.note_started(holder, now_s)

    def next_tokens(self, item: SequenceTokens, worker: WorkerRef, now_s: float) -> TokensEvent | None:
        """The way of nearly all tokens: next in line, from the worker that sent the ones before. None: any other."""
        attempt, index = self.attempt, item.index
        if attempt is None or attempt.finish is not None or index < 2 or index != len(self.output):
            return None  # the first two tokens of a request are marks of its waterfall
        holder = attempt.decode
        is_heard = holder is not None and holder.has_tokens and not holder.is_gone and holder.worker == worker
        if holder is None or not is_heard or item.timing is not None or item.key != attempt.key or not item.token_ids:
            return None
        self.output.extend(item.token_ids)
        attempt.last_progress_s, holder.num_absences, holder.state = now_s, 0, SequenceState.RUNNING
        return TokensEvent(self.key.choice, index, item.token_ids, item.logprobs)

    def on_tokens(self, item: SequenceTokens, worker: WorkerRef, now_s: float) -> list[Action]:
        """Emit what is new and next in line, wherever the item begins."""
        holder, attempt = self.holder_of(item.key, worker), self.attempt
        if holder is None or attempt is None:
            return []
        known = len(self.output)
        num_seen = known - item.index
        if num_seen < 0 or self.lacks_scores:
            return self.ask_resend(holder, now_s)
        seen = item.token_ids[:num_seen]
        if seen != self.output[item.index : item.index + len(seen)]:
            return self._diverged(holder, item.index, now_s)
        num_expected = int(holder is attempt.decode and not holder.has_tokens and item.index == attempt.first_index)
        actions: list[Action] = []
        if len(seen) > num_expected:
            actions.append(Dropped(len(seen) - num_expected))
        fresh = item.token_ids[num_seen:]
        if fresh:
            self.output.extend(fresh)
            logprobs = None if item.logprobs is None else item.logprobs[num_seen:]
            actions.append(Emit(TokensEvent(self.key.choice, known, fresh, logprobs)))
            if holder is attempt.decode:
                holder.state = SequenceState.RUNNING
        return actions + self._heard_tokens(attempt, holder, now_s) + self._try_finish(now_s)

    def on_prompt_logprobs(self, message: PromptLogprobs, worker: WorkerRef, now_s: float) -> list[Action]:
        """Hand on what is new and next in line; another attempt begins again, and repeats what is known."""
        holder, attempt = self.holder_of(message.key, worker), self.attempt
        if holder is None or attempt is None:
            return []
        holder.is_seen, holder.num_absences, attempt.last_progress_s = True, 0, now_s
        actions = self.note_started(holder, now_s) if holder is attempt.prefill else []
        num_seen = self.num_scored - message.index
        if num_seen < 0:
            return actions + self.ask_resend(holder, now_s)
        fresh = message.logprobs[num_seen:]
        self.num_scored += len(fresh)
        return [Score(fresh), *actions] if fresh else actions

    def on_finished(self, message: Finished, worker: WorkerRef, now_s: float) -> list[Action]:
        """Finish when all tokens are there; ask for the missing ones otherwise."""
        holder, attempt = self.holder_of(message.key, worker), self.attempt
        if holder is None or attempt is None:
            return []
        holder.is_seen = True
        attempt.finish, attempt.finisher = message, holder
        if message.num_output_tokens > len(self.output):
            return self.ask_resend(holder, now_s)
        return self._try_finish(now_s)

    # --- ends

    def cancel(self, reason: CancelReason) -> list[Action]:
        """Stop everywhere, in every state. No event follows."""
        return [] if self.is_done else self._end(reason)

    def fail(self, error: RequestError, reason: CancelReason = CancelReason.FAILED) -> list[Action]:
        """End the sequence, and with it its request, with this error."""
        return [*self._end(reason), Fail(error)]

    def requeue(self, reason: FailReason, now_s: float, *, is_fault: bool = False) -> list[Action]:
        """End the attempt everywhere; the sequence goes back to the queue with what was emitted."""
        phase = _LOST_IN.get(self.phase, Phase.PREFILL)
        cancels = self._cancel_holders(CancelReason.SUPERSEDED)
        self.attempt = None
        end = self.request.natural_end(self.output)
        if end is not None:
            return [*cancels, *self._finish(*end)]
        self.num_faults += is_fault
        if self.num_faults >= self.limits.max_attempts:
            return [*cancels, *self.fail(outcomes.attempts_error(self.num_faults, reason))]
        self.num_retries += 1
        return [*cancels, Requeue(phase, reason, now_s + self.limits.backoff_s(self.num_retries))]

    # --- shared with recovery.py

    def holder_of(self, key: AttemptKey, worker: WorkerRef) -> Assignment | None:
        """The assignment that a message about `key` speaks for; None: late, foreign or given up."""
        if self.is_done or self.attempt is None or key != self.attempt.key:
            return None
        return self.holder(worker)

    def holder(self, worker: WorkerRef) -> Assignment | None:
        """The current attempt's assignment at this worker, unless it is given up."""
        if self.attempt is None:
            return None
        for assignment in (self.attempt.decode, self.attempt.prefill):
            if assignment is not None and assignment.worker == worker:
                return None if assignment.is_gone else assignment
        return None

    def holders(self) -> list[Assignment]:
        """Assignments that may hold the attempt. A prefill worker is done once the decode worker sends tokens."""
        attempt = self.attempt
        if attempt is None:
            return []
        decode_has_kv = attempt.decode is not None and attempt.decode.has_tokens
        candidates = [None if decode_has_kv else attempt.prefill, attempt.decode]
        return [holder for holder in candidates if holder is not None and not holder.is_gone]

    def note_started(self, holder: Assignment, now_s: float) -> list[Action]:
        """The prefill worker computes, as its Started, a roster or token 0 tells."""
        attempt = self.attempt
        if attempt is None or attempt.is_started:
            return []
        attempt.is_started, attempt.last_progress_s, holder.state = True, now_s, SequenceState.RUNNING
        return [WantDecode()] if self.wants_decode else []

    def ask_resend(self, holder: Assignment, now_s: float) -> list[Action]:
        """Ask for what is behind the last known token again, but not all the time.

        While log-probabilities of the prompt are missing, the worker that computed the prompt is asked.
        """
        attempt = self.attempt
        assert attempt is not None, f"{self.key} has no attempt"
        if now_s - attempt.last_resend_s < self.limits.resend_interval_s:
            return []
        attempt.last_resend_s = now_s
        scorer = attempt.prefill if self.lacks_scores and attempt.prefill is not None else holder
        message = ResendTokens(
            **attempt.key._asdict(),
            gateway_id=self.sender.gateway_id,
            from_index=len(self.output),
            from_prompt_index=self.num_scored if self.lacks_scores else None,
        )
        return [Send(scorer.worker, message)]

    def cancel_of(self, reason: CancelReason) -> Cancel:
        """The message that stops the current attempt."""
        assert self.attempt is not None, f"{self.key} has no attempt"
        return Cancel(**self.attempt.key._asdict(), reason=reason)

    # --- inside

    def _begin(self, now_s: float) -> Attempt:
        assert self.attempt is None, f"{self.key} is {self.phase}, not queued"
        assert not self.is_done, f"{self.key} is over"
        self.num_attempts += 1
        self.attempt = Attempt(
            key=AttemptKey(*self.key, self.num_attempts, self._new_nonce()),
            first_index=len(self.output),
            will_decode=self.request.num_left(len(self.output)) > 1,
            last_progress_s=now_s,
        )
        return self.attempt

    def _heard_tokens(self, attempt: Attempt, holder: Assignment, now_s: float) -> list[Action]:
        attempt.last_progress_s, holder.num_absences = now_s, 0
        if holder.has_tokens:
            return []
        holder.is_seen = holder.has_tokens = True
        attempt.token0_s = attempt.token0_s or now_s
        if holder is attempt.decode:
            holder.state = SequenceState.RUNNING
            return []
        actions = self.note_started(holder, now_s)
        holder.state = SequenceState.LEASED
        return actions

    def _try_finish(self, now_s: float) -> list[Action]:
        finish = self.attempt.finish if self.attempt is not None else None
        finisher = self.attempt.finisher if self.attempt is not None else None
        if finish is None or finisher is None or len(self.output) < finish.num_output_tokens:
            return []
        if len(self.output) > finish.num_output_tokens:
            return self._diverged(finisher, finish.num_output_tokens, now_s)
        return self._finish(finish.finish_reason, finish.stop_token_id)

    def _finish(self, finish_reason: FinishReason, stop_token_id: int | None) -> list[Action]:
        """A good end. When the prefill worker ended it with token 0, a decode worker that waits for it is told."""
        event = FinishedEvent(self.key.choice, finish_reason, stop_token_id, len(self.output))
        decode = self.attempt.decode if self.attempt is not None else None
        is_waiting = decode is not None and not decode.has_tokens
        cancels = self._end(CancelReason.FINISHED)
        return [Emit(event), *(cancels if is_waiting else [])]

    def _end(self, reason: CancelReason) -> list[Action]:
        """Whatever comes from now on is late."""
        cancels = self._cancel_holders(reason)
        self.is_done, self.attempt = True, None
        return cancels

    def _cancel_holders(self, reason: CancelReason) -> list[Action]:
        return [Send(holder.worker, self.cancel_of(reason)) for holder in self.holders()]

    def _diverged(self, holder: Assignment, index: int, now_s: float) -> list[Action]:
        return [Diverged(index), Avoid(holder.worker), *self.requeue(FailReason.DIVERGENCE, now_s, is_fault=True)]
