"""What is done when an attempt goes wrong: lost messages, refusals, dead workers, time that runs out. Pure.

Functions take a sequence's machine and what was noticed, and return the actions that exchange.py performs in order.

- While the prefill worker holds the KV and the decode worker has sent nothing, a lost decode worker is replaced
  within the attempt: nothing is computed twice. Otherwise the next attempt computes original prompt + emitted tokens.
- An end that is no worker's fault (no room, draining, a job that the bus lost) does not count against MAX_ATTEMPTS.
"""

from __future__ import annotations

from pdserve.gateway.dispatch import outcomes
from pdserve.gateway.dispatch.actions import Action, Avoid, Send, WantDecode
from pdserve.gateway.dispatch.attempt import Assignment, Attempt
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.messages import Failed, RosterItem
from pdserve.reasons import CancelReason, FailReason, SequenceState
from pdserve.registration import WorkerRef

_STARTED_STATES = frozenset({SequenceState.RUNNING, SequenceState.LEASED, SequenceState.FINISHED})
"""States of a roster that tell that a prefill worker has begun, when its Started was lost."""


def on_failed(machine: SequenceMachine, message: Failed, worker: WorkerRef, now_s: float) -> list[Action]:
    """Replace the worker, try again, or end with the worker's verdict."""
    holder = machine.holder_of(message.key, worker)
    if holder is None:
        return []
    if not message.retryable or message.reason == FailReason.DEADLINE:
        holder.is_gone = True
        return machine.fail(outcomes.error_of_failed(message, len(machine.request.prompt_token_ids)))
    holder.is_seen = True
    is_fault = message.reason not in outcomes.FREE_REASONS
    return _lose(machine, holder, message.reason, now_s, is_fault=is_fault, was_running=message.was_in_step)


def on_roster(
    machine: SequenceMachine,
    item: RosterItem | None,
    worker: WorkerRef,
    now_s: float,
    *,
    epoch: int,
    bus_up_since_s: float,
) -> list[Action]:
    """A worker listed what it holds; `item` is this attempt's line, None when there is none."""
    holder, attempt = machine.holder(worker), machine.attempt
    if holder is None or attempt is None:
        return []
    if item is not None and item.key == attempt.key:
        return _present(machine, attempt, holder, item, now_s)
    if holder is attempt.prefill and not attempt.needs_prefill:
        return []
    if not holder.is_missed_again(now_s, max(holder.sent_s, bus_up_since_s), machine.limits.roster_grace_s):
        return []
    return _absent(machine, attempt, holder, now_s, epoch)


def on_worker_gone(machine: SequenceMachine, worker: WorkerRef, now_s: float) -> list[Action]:
    """The worker is dead, as its registration tells."""
    holder = machine.holder(worker)
    if holder is None:
        return []
    was_running = holder.state == SequenceState.RUNNING
    holder.is_gone = True
    return _lose(machine, holder, FailReason.WORKER_GONE, now_s, is_fault=True, was_running=was_running)


def on_tick(machine: SequenceMachine, now_s: float) -> list[Action]:
    """Timers: the deadline, the lease, repeated questions, progress."""
    if machine.is_done:
        return []
    if now_s >= machine.request.deadline_s:
        return machine.fail(outcomes.deadline_error(), reason=CancelReason.DEADLINE)
    attempt, limits = machine.attempt, machine.limits
    if attempt is None:
        return []
    if machine.wants_decode and attempt.is_lease_over(now_s, limits.kv_lease_s):
        return machine.requeue(FailReason.NO_CAPACITY, now_s)
    if now_s - attempt.last_progress_s > limits.progress_timeout_s:
        avoid: list[Action] = [Avoid(holder.worker) for holder in machine.holders()[-1:]]
        return [*avoid, *machine.requeue(FailReason.NO_PROGRESS, now_s, is_fault=True)]
    return [] if attempt.finisher is None else machine.ask_resend(attempt.finisher, now_s)


def on_bus_down(machine: SequenceMachine, now_s: float) -> None:
    """While the bus is away no worker can make progress, so none is blamed for not making any."""
    if machine.attempt is not None:
        machine.attempt.last_progress_s = now_s


def on_all_refused(machine: SequenceMachine, now_s: float) -> list[Action]:
    """Every decode worker there is had this attempt and refused or failed it."""
    return machine.requeue(FailReason.NO_CAPACITY, now_s)


# --- rosters


def _present(
    machine: SequenceMachine, attempt: Attempt, holder: Assignment, item: RosterItem, now_s: float
) -> list[Action]:
    # A decode worker shows progress by its tokens; one that computes the prompt itself has none until then.
    is_decoding = holder is attempt.decode and item.state == SequenceState.RUNNING
    is_computing = attempt.prefill is None and not holder.has_tokens
    if is_computing or not (is_decoding and holder.state == item.state):
        attempt.last_progress_s = now_s
    holder.is_seen, holder.num_absences = True, 0
    actions: list[Action] = []
    if holder is attempt.prefill and item.state in _STARTED_STATES:
        actions += machine.note_started(holder, now_s)
    holder.state = item.state
    is_finish_lost = item.state == SequenceState.FINISHED and holder in machine.holders()
    if item.next_index > len(machine.output) or is_finish_lost:
        actions += machine.ask_resend(holder, now_s)
    return actions


def _absent(machine: SequenceMachine, attempt: Attempt, holder: Assignment, now_s: float, epoch: int) -> list[Action]:
    """The worker does not have the attempt: its job never arrived, or it has lost it."""
    if holder is attempt.decode and not holder.is_seen and holder.num_sends == 1:
        holder.num_sends, holder.num_absences = holder.num_sends + 1, 0
        holder.sent_s, holder.epoch = now_s, epoch
        return [machine.decode_job(now_s)]  # the same one again, for the prefill worker's lease holds
    was_lost_by_bus = not holder.is_seen or epoch != holder.epoch
    return _lose(machine, holder, FailReason.LOST, now_s, is_fault=not was_lost_by_bus, was_running=False)


# --- a worker is lost for the attempt


def _lose(
    machine: SequenceMachine,
    holder: Assignment,
    reason: FailReason,
    now_s: float,
    *,
    is_fault: bool,
    was_running: bool,
) -> list[Action]:
    """Replace the worker, or try again from what was emitted."""
    attempt = machine.attempt
    assert attempt is not None, f"{machine.key} has no attempt"
    if was_running:
        machine.num_running_deaths += 1
        if machine.num_running_deaths >= outcomes.MAX_RUNNING_DEATHS:
            return machine.fail(outcomes.running_deaths_error())
    is_hand_off = holder is attempt.decode and attempt.prefill is not None
    peer = attempt.prefill.worker if attempt.prefill and is_hand_off and reason in outcomes.TRANSFER_REASONS else None
    avoid = Avoid(holder.worker, peer)
    if is_hand_off:
        return [avoid, *_replace_decode(machine, attempt, holder, reason, now_s, is_fault=is_fault)]
    if holder is attempt.prefill and not attempt.needs_prefill:
        holder.is_gone = True  # the decode worker may have all it needs; if not, it will say so
        return [avoid]
    return [avoid, *machine.requeue(reason, now_s, is_fault=is_fault)]


def _replace_decode(
    machine: SequenceMachine,
    attempt: Attempt,
    holder: Assignment,
    reason: FailReason,
    now_s: float,
    *,
    is_fault: bool,
) -> list[Action]:
    limits = machine.limits
    attempt.num_decode_faults += is_fault
    can_replace = (
        not holder.has_tokens
        and attempt.prefill is not None
        and not attempt.prefill.is_gone
        and attempt.num_decode_faults < limits.max_decode_faults
        and machine.num_faults + is_fault < limits.max_attempts
    )
    if not can_replace:
        return machine.requeue(reason, now_s, is_fault=is_fault)
    machine.num_faults += is_fault
    cancel = [] if holder.is_gone else [Send(holder.worker, machine.cancel_of(CancelReason.REPLACED))]
    attempt.refused.add(holder.worker)
    attempt.decode, attempt.decode_lost_s, attempt.last_progress_s = None, now_s, now_s
    if attempt.finisher is holder:
        attempt.finish = attempt.finisher = None
    return [*cancel, WantDecode()]
