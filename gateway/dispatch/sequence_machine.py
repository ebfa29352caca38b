"""The state machine of ONE sequence, over all its attempts. Pure: no clock, no bus, no choice of workers.

Methods take what happened and `now_s`, and return the actions that the edge performs in order.

    queued ──dispatch──> dispatched ──Started──> prefilling ──token 0──> handed_off ──D's tokens──> decoding ──> done
      ^                      │                       │                       │                          │
      └──────────────────────┴───────────────────────┴── Requeue: attempt+1 ─┴──────────────────────────┘

- Tokens are idempotent by (sequence, attempt, index). What is behind is dropped, what is ahead is asked for again,
  and the same index with another token ends the attempt.
- Exactly one producer: only the current workers of the current attempt are heard; everything older is ignored.
- While P holds the KV and D has sent nothing, a lost D is replaced within the attempt: nothing is computed twice.
  Otherwise the next attempt computes original prompt + emitted tokens.
- Exactly one end: finished, failed or cancelled.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pdserve.errors import RequestError
from pdserve.gateway.dispatch import outcomes
from pdserve.gateway.dispatch.actions import Action, Avoid, Diverged, Dropped, Emit, Fail, Requeue, Send, WantDecode
from pdserve.gateway.dispatch.attempt import Assignment, Attempt
from pdserve.gateway.dispatch.jobs import SequenceSpec
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.generation.request import FinishedEvent, TokensEvent
from pdserve.ids import Nonce
from pdserve.messages import (
    AttemptKey,
    Failed,
    Finished,
    RosterItem,
    SequenceTokens,
    Started,
)
from pdserve.reasons import CancelReason, FailReason, FinishReason, SequenceState
from pdserve.registration import WorkerRef


class SequenceMachine:
    """One sequence from the queue to its end. `attempt` is None while it waits in the gateway."""

    def __init__(
        self, spec: SequenceSpec, limits: RetryLimits, new_nonce: Callable[[], str] = lambda: secrets.token_hex(12)
    ) -> None:
        self.spec, self.limits = spec, limits
        self.attempt: Attempt | None = None
        self.is_done = False
        self.output: list[int] = []
        """Every token emitted to the client, over all attempts."""
        self.num_attempts = 0
        self.num_faults = 0
        """Ends that count against max_attempts."""
        self.num_retries = 0
        self.num_running_deaths = 0
        self._new_nonce = new_nonce

    @property
    def phase(self) -> str:
        """Where the sequence is; see the picture above."""
        attempt = self.attempt
        if self.is_done or attempt is None:
            return "done" if self.is_done else "queued"
        if attempt.decode is not None and attempt.decode.has_tokens:
            return "decoding"
        if attempt.token0_s is not None:
            return "handed_off"
        return "prefilling" if attempt.is_started else "dispatched"

    # --- the edge's choices

    def dispatch(self, prefill: WorkerRef, now_s: float, epoch: int) -> list[Action]:
        """Start the next attempt with a prefill worker."""
        attempt = self._begin(now_s)
        attempt.prefill = Assignment(prefill, now_s, epoch, state=SequenceState.WAITING)
        return [Send(prefill, self.spec.prefill_job(attempt.key, self.output, now_s))]

    def dispatch_local(self, decode: WorkerRef, now_s: float, epoch: int) -> list[Action]:
        """Start the next attempt on a decode worker that computes the prompt itself."""
        attempt = self._begin(now_s)
        attempt.decode = Assignment(decode, now_s, epoch, state=SequenceState.WAITING)
        return [Send(decode, self.spec.decode_job(attempt.key, self.output, None, now_s))]

    def assign_decode(self, decode: WorkerRef, now_s: float, epoch: int) -> list[Action]:
        """Bind the hand-off to a decode worker."""
        attempt = self.attempt
        assert attempt is not None, f"{self.spec.key} is {self.phase}, no decode worker is wanted"
        assert attempt.wants_decode, f"{attempt.key} wants no decode worker"
        assert decode not in attempt.refused, f"{decode} had {attempt.key} before"
        attempt.decode = Assignment(decode, now_s, epoch, state=SequenceState.RECEIVING)
        attempt.last_progress_s = now_s
        return [self._decode_job(attempt, now_s)]

    def no_decode_worker(self, now_s: float) -> list[Action]:
        """Every decode worker there is had this attempt and refused or failed it."""
        return self._requeue(FailReason.NO_CAPACITY, now_s)

    # --- what workers say

    def on_started(self, message: Started, worker: WorkerRef, now_s: float) -> list[Action]:
        """P has reserved the blocks: time to choose D."""
        holder = self._holder(message.key, worker)
        if holder is None or holder is not self._attempt.prefill:
            return []
        holder.is_seen = True
        return self._note_started(holder, now_s)

    def on_tokens(self, item: SequenceTokens, worker: WorkerRef, now_s: float) -> list[Action]:
        """Emit what is new and next in line."""
        holder = self._holder(item.key, worker)
        if holder is None:
            return []
        attempt, known = self._attempt, len(self.output)
        num_seen = known - item.index
        if num_seen == 0 and item.token_ids and holder.has_tokens and attempt.finish is None:
            return self._next_in_line(holder, item, now_s)
        if num_seen < 0:
            return self._ask_resend(holder, now_s)
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
            actions.append(Emit(TokensEvent(self.spec.choice, known, fresh, logprobs)))
        return actions + self._heard_tokens(holder, now_s) + self._try_finish(now_s)

    def on_finished(self, message: Finished, worker: WorkerRef, now_s: float) -> list[Action]:
        """Finish when all tokens are there; ask for the missing ones otherwise."""
        holder = self._holder(message.key, worker)
        if holder is None:
            return []
        holder.is_seen = True
        self._attempt.finish, self._attempt.finisher = message, holder
        if message.num_output_tokens > len(self.output):
            return self._ask_resend(holder, now_s)
        return self._try_finish(now_s)

    def on_failed(self, message: Failed, worker: WorkerRef, now_s: float) -> list[Action]:
        """Replace the worker, try again, or end with the worker's verdict."""
        holder = self._holder(message.key, worker)
        if holder is None:
            return []
        if not message.retryable or message.reason == FailReason.DEADLINE:
            holder.is_gone = True
            return self._fail(outcomes.error_of_failed(message, len(self.spec.prompt_token_ids)))
        holder.is_seen = True
        return self._lose(holder, message.reason, now_s, is_fault=message.reason not in outcomes.FREE_REASONS,
                          was_running=message.was_in_step)  # fmt: skip

    def on_roster(
        self, item: RosterItem | None, worker: WorkerRef, now_s: float, *, epoch: int, bus_up_since_s: float
    ) -> list[Action]:
        """A worker listed what it holds; `item` is this attempt's line, None when there is none."""
        holder = self.attempt.holder(worker) if self.attempt is not None else None
        if holder is None or holder.is_gone:
            return []
        if item is None or item.key != self._attempt.key:
            return self._absent(holder, now_s, epoch, bus_up_since_s)
        return self._present(holder, item, now_s)

    def on_worker_gone(self, worker: WorkerRef, now_s: float) -> list[Action]:
        """The worker is dead."""
        holder = self.attempt.holder(worker) if self.attempt is not None else None
        if holder is None or holder.is_gone:
            return []
        was_running = holder.state == SequenceState.RUNNING
        holder.is_gone = True
        return self._lose(holder, FailReason.WORKER_GONE, now_s, is_fault=True, was_running=was_running)

    # --- time and the client

    def on_tick(self, now_s: float) -> list[Action]:
        """Timers: the deadline, the lease, repeated questions, progress."""
        if not self.is_done and now_s >= self.spec.deadline_s:
            return self._fail(outcomes.deadline_error(), reason=CancelReason.DEADLINE)
        attempt = self.attempt
        if self.is_done or attempt is None:
            return []
        if attempt.wants_decode and attempt.is_lease_over(now_s, self.limits.kv_lease_s):
            return self._requeue(FailReason.NO_CAPACITY, now_s)
        if now_s - attempt.last_progress_s > self.limits.progress_timeout_s:
            return self._no_progress(attempt, now_s)
        return [] if attempt.finisher is None else self._ask_resend(attempt.finisher, now_s)

    def hold(self, now_s: float) -> None:
        """The bus is away: nobody can make progress, so nobody is blamed for not making any."""
        if self.attempt is not None:
            self.attempt.last_progress_s = now_s

    def cancel(self, reason: CancelReason, now_s: float) -> list[Action]:
        """Stop everywhere, in every state. No event follows."""
        return [] if self.is_done else self._end(reason)

    # --- inside

    @property
    def _attempt(self) -> Attempt:
        assert self.attempt is not None, f"{self.spec.key} has no attempt"
        return self.attempt

    def _begin(self, now_s: float) -> Attempt:
        assert self.phase == "queued", f"{self.spec.key} is {self.phase}, not queued"
        self.num_attempts += 1
        key = AttemptKey(*self.spec.key, self.num_attempts, Nonce(self._new_nonce()))
        self.attempt = Attempt(
            key=key,
            first_index=len(self.output),
            will_decode=self.spec.num_left(self.output) > 1,
            last_progress_s=now_s,
        )
        return self.attempt

    def _decode_job(self, attempt: Attempt, now_s: float) -> Send:
        assert attempt.decode is not None, f"{attempt.key} has no decode worker"
        prefill = attempt.prefill.worker if attempt.prefill is not None else None
        prompt_output = self.output[: attempt.first_index]
        return Send(attempt.decode.worker, self.spec.decode_job(attempt.key, prompt_output, prefill, now_s))

    def _holder(self, key: AttemptKey, worker: WorkerRef) -> Assignment | None:
        """The current holder that a message speaks for; None: late, foreign or given up."""
        if self.is_done or self.attempt is None or key != self.attempt.key:
            return None
        holder = self.attempt.holder(worker)
        return None if holder is None or holder.is_gone else holder

    def _next_in_line(self, holder: Assignment, item: SequenceTokens, now_s: float) -> list[Action]:
        """The way of nearly all tokens: no more is done than must be."""
        index = len(self.output)
        self.output.extend(item.token_ids)
        self._attempt.last_progress_s, holder.num_absences, holder.state = now_s, 0, SequenceState.RUNNING
        return [Emit(TokensEvent(self.spec.choice, index, item.token_ids, item.logprobs))]

    def _note_started(self, holder: Assignment, now_s: float) -> list[Action]:
        attempt = self._attempt
        if attempt.is_started:
            return []
        attempt.is_started, attempt.last_progress_s, holder.state = True, now_s, "running"
        return [WantDecode()] if attempt.wants_decode else []

    def _heard_tokens(self, holder: Assignment, now_s: float) -> list[Action]:
        attempt = self._attempt
        attempt.last_progress_s, holder.num_absences = now_s, 0
        if holder.has_tokens:
            return []
        holder.is_seen = holder.has_tokens = True
        attempt.token0_s = attempt.token0_s or now_s
        actions = self._note_started(holder, now_s) if holder is attempt.prefill else []
        holder.state = SequenceState.LEASED if holder is attempt.prefill else "running"
        return actions

    def _try_finish(self, now_s: float) -> list[Action]:
        finish = self.attempt.finish if self.attempt is not None else None
        if finish is None or len(self.output) < finish.num_output_tokens:
            return []
        finisher = self._attempt.finisher
        if finisher is not None and len(self.output) > finish.num_output_tokens:
            return self._diverged(finisher, finish.num_output_tokens, now_s)
        return self._finish(finish.finish_reason, finish.stop_token_id)

    def _finish(self, finish_reason: FinishReason, stop_token_id: int | None) -> list[Action]:
        """A good end. When P ended the sequence with token 0, a decode worker that waits for it is told."""
        event = FinishedEvent(self.spec.choice, finish_reason, stop_token_id, len(self.output))
        decode = self.attempt.decode if self.attempt is not None else None
        is_waiting = decode is not None and not decode.has_tokens
        cancels = self._end(CancelReason.FINISHED)
        return [Emit(event), *(cancels if is_waiting else [])]

    def _fail(self, error: RequestError, reason: CancelReason = CancelReason.FAILED) -> list[Action]:
        return [*self._end(reason), Fail(error)]

    def _end(self, reason: CancelReason) -> list[Action]:
        """Whatever comes from now on is late."""
        cancels = self._cancel_holders(reason)
        self.is_done, self.attempt = True, None
        return cancels

    def _ask_resend(self, holder: Assignment, now_s: float) -> list[Action]:
        attempt = self._attempt
        if now_s - attempt.last_resend_s < self.limits.resend_interval_s:
            return []
        attempt.last_resend_s = now_s
        return [Send(holder.worker, attempt.resend_message(self.spec.gateway_id, len(self.output)))]

    def _diverged(self, holder: Assignment, index: int, now_s: float) -> list[Action]:
        return [Diverged(index), Avoid(holder.worker), *self._requeue(FailReason.DIVERGENCE, now_s, is_fault=True)]

    def _no_progress(self, attempt: Attempt, now_s: float) -> list[Action]:
        holders = attempt.holders()
        avoid: list[Action] = [Avoid(holders[-1].worker)] if holders else []
        return [*avoid, *self._requeue(FailReason.NO_PROGRESS, now_s, is_fault=True)]

    def _present(self, holder: Assignment, item: RosterItem, now_s: float) -> list[Action]:
        attempt = self._attempt
        # A decode worker shows progress by its tokens; one that computes the prompt itself has none until then.
        is_decoding = holder is attempt.decode and item.state == SequenceState.RUNNING
        is_computing = attempt.prefill is None and not holder.has_tokens
        if is_computing or not (is_decoding and holder.state == item.state):
            attempt.last_progress_s = now_s
        holder.is_seen, holder.num_absences = True, 0
        actions: list[Action] = []
        if holder is attempt.prefill and item.state in (
            SequenceState.RUNNING,
            SequenceState.LEASED,
            SequenceState.FINISHED,
        ):
            actions += self._note_started(holder, now_s)
        holder.state = item.state
        is_finish_lost = item.state == SequenceState.FINISHED and holder in attempt.holders()
        if item.next_index > len(self.output) or is_finish_lost:
            actions += self._ask_resend(holder, now_s)
        return actions

    def _absent(self, holder: Assignment, now_s: float, epoch: int, bus_up_since_s: float) -> list[Action]:
        """Twice in a row counts; a roster that may be older than the job, or a doubled one, does not."""
        attempt, grace_s = self._attempt, self.limits.roster_grace_s
        if holder is attempt.prefill and not attempt.needs_prefill:
            return []
        is_too_early = now_s - max(holder.sent_s, bus_up_since_s) < grace_s
        if is_too_early or now_s - holder.last_absence_s < grace_s / 2:
            return []
        holder.num_absences += 1
        holder.last_absence_s = now_s
        if holder.num_absences < 2:
            return []
        if holder is attempt.decode and not holder.is_seen and holder.num_sends == 1:
            return self._send_again(holder, now_s, epoch)
        was_lost_by_bus = not holder.is_seen or epoch != holder.epoch
        return self._lose(holder, FailReason.LOST, now_s, is_fault=not was_lost_by_bus, was_running=False)

    def _send_again(self, holder: Assignment, now_s: float, epoch: int) -> list[Action]:
        """A DecodeJob that never arrived: the same job again, for P's lease holds."""
        holder.num_sends, holder.num_absences = holder.num_sends + 1, 0
        holder.sent_s, holder.epoch = now_s, epoch
        return [self._decode_job(self._attempt, now_s)]

    def _lose(
        self, holder: Assignment, reason: FailReason, now_s: float, *, is_fault: bool, was_running: bool
    ) -> list[Action]:
        """One of the attempt's workers is lost for it: replace the worker, or try again from what was emitted."""
        attempt = self._attempt
        if was_running:
            self.num_running_deaths += 1
            if self.num_running_deaths >= outcomes.MAX_RUNNING_DEATHS:
                return self._fail(outcomes.running_deaths_error())
        avoid = self._avoid(holder, reason)
        if holder is attempt.decode and attempt.prefill is not None:
            return [*avoid, *self._replace_decode(holder, reason, now_s, is_fault=is_fault)]
        if holder is attempt.prefill and not attempt.needs_prefill:
            holder.is_gone = True  # D may have all it needs; if not, D will say so
            return avoid
        return [*avoid, *self._requeue(reason, now_s, is_fault=is_fault)]

    def _avoid(self, holder: Assignment, reason: FailReason) -> list[Action]:
        attempt = self._attempt
        if reason in outcomes.TRANSFER_REASONS and holder is attempt.decode and attempt.prefill is not None:
            return [Avoid(holder.worker, attempt.prefill.worker)]
        return [Avoid(holder.worker)]

    def _replace_decode(self, holder: Assignment, reason: FailReason, now_s: float, *, is_fault: bool) -> list[Action]:
        attempt = self._attempt
        attempt.num_decode_faults += is_fault
        can_replace = (
            not holder.has_tokens
            and attempt.prefill is not None
            and not attempt.prefill.is_gone
            and attempt.num_decode_faults < self.limits.max_decode_faults
            and self.num_faults + is_fault < self.limits.max_attempts
        )
        if not can_replace:
            return self._requeue(reason, now_s, is_fault=is_fault)
        self.num_faults += is_fault
        cancel = [] if holder.is_gone else [Send(holder.worker, attempt.cancel_message(CancelReason.REPLACED))]
        attempt.refused.add(holder.worker)
        attempt.decode, attempt.decode_lost_s, attempt.last_progress_s = None, now_s, now_s
        if attempt.finisher is holder:
            attempt.finish = attempt.finisher = None
        return [*cancel, WantDecode()]

    def _requeue(self, reason: FailReason, now_s: float, *, is_fault: bool = False) -> list[Action]:
        """End the attempt everywhere; the sequence goes back to the queue with what was emitted."""
        phase = {"decoding": "decode", "handed_off": "handoff"}.get(self.phase, "prefill")
        cancels = self._cancel_holders(CancelReason.SUPERSEDED)
        self.attempt = None
        end = self.spec.natural_end(self.output)
        if end is not None:
            return [*cancels, *self._finish(*end)]
        self.num_faults += is_fault
        if self.num_faults >= self.limits.max_attempts:
            return [*cancels, *self._fail(outcomes.attempts_error(self.num_faults, reason))]
        self.num_retries += 1
        not_before_s = now_s + self.limits.backoff_s(self.num_retries)
        return [*cancels, Requeue(phase, reason, not_before_s)]

    def _cancel_holders(self, reason: CancelReason) -> list[Action]:
        attempt = self.attempt
        if attempt is None:
            return []
        return [Send(holder.worker, attempt.cancel_message(reason)) for holder in attempt.holders()]
