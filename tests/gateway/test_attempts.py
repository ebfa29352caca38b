"""The state machine of one sequence, rule by rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from pdserve.gateway.actions import Action, Avoid, Diverged, Dropped, Emit, Fail, Requeue, Send, WantDecode, WorkerRef
from pdserve.gateway.attempts import SequenceAttempts
from pdserve.gateway.jobs import SequenceSpec
from pdserve.gateway.outcomes import RetryLimits
from pdserve.gateway.request import FinishedEvent, TokensEvent
from pdserve.messages import (
    AttemptKey,
    Cancel,
    DecodeJob,
    Failed,
    Finished,
    Message,
    PrefillJob,
    ResendTokens,
    RosterItem,
    SequenceTokens,
    Started,
    TokenLogprobs,
)
from pdserve.sampling_params import SamplingParams

P, P2 = WorkerRef("P", "1"), WorkerRef("P2", "1")
D, D2 = WorkerRef("D", "1"), WorkerRef("D2", "1")
LIMITS = RetryLimits(max_attempts=3, kv_lease_s=10.0, progress_timeout_s=20.0)
M = TypeVar("M", bound=Message)


class Bench:
    """A machine with short words for what workers say."""

    def __init__(self, *, max_tokens: int = 8, limits: RetryLimits = LIMITS, **sampling: Any) -> None:
        nonces = itertools.count()
        eos = frozenset({99})
        spec = SequenceSpec(
            request_id="r",
            choice=0,
            gateway_id="gw",
            fingerprint="f",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(seed=5, max_tokens=max_tokens, **sampling),
            deadline_s=100.0,
            eos_token_ids=eos,
        )
        self.machine = SequenceAttempts(spec, limits, lambda: f"nonce{next(nonces)}")
        self.now_s = 0.0

    @property
    def key(self) -> AttemptKey:
        assert self.machine.attempt is not None
        return self.machine.attempt.key

    def at(self, now_s: float) -> Bench:
        self.now_s = now_s
        return self

    def dispatch(self, worker: WorkerRef = P) -> list[Action]:
        return self.machine.dispatch(worker, self.now_s, 0)

    def assign(self, worker: WorkerRef = D) -> list[Action]:
        return self.machine.assign_decode(worker, self.now_s, 0)

    def started(self, worker: WorkerRef = P, key: AttemptKey | None = None) -> list[Action]:
        message = Started(
            **(key or self.key)._asdict(),
            worker_id=worker.worker_id,
            generation=worker.generation,
            num_cached_tokens=0,
            schedule_s=0.0,
        )
        return self.machine.on_started(message, worker, self.now_s)

    def tokens(self, index: int, *token_ids: int, worker: WorkerRef, key: AttemptKey | None = None) -> list[Action]:
        item = SequenceTokens(**(key or self.key)._asdict(), index=index, token_ids=list(token_ids))
        return self.machine.on_tokens(item, worker, self.now_s)

    def finished(self, num_output_tokens: int, *, worker: WorkerRef, reason: str = "length") -> list[Action]:
        message = Finished(
            **self.key._asdict(),
            worker_id=worker.worker_id,
            generation=worker.generation,
            finish_reason=reason,
            num_output_tokens=num_output_tokens,
        )
        return self.machine.on_finished(message, worker, self.now_s)

    def failed(self, reason: str, *, worker: WorkerRef, retryable: bool = True, in_step: bool = False) -> list[Action]:
        message = Failed(
            **self.key._asdict(),
            worker_id=worker.worker_id,
            generation=worker.generation,
            reason=reason,
            retryable=retryable,
            was_in_step=in_step,
        )
        return self.machine.on_failed(message, worker, self.now_s)

    def roster(
        self, worker: WorkerRef, state: str | None = None, next_index: int = 0, *, epoch: int = 0, up_s: float = 0.0
    ) -> list[Action]:
        item = None if state is None else RosterItem(**self.key._asdict(), state=state, next_index=next_index)
        return self.machine.on_roster(item, worker, self.now_s, epoch=epoch, bus_up_since_s=up_s)

    def gone(self, worker: WorkerRef) -> list[Action]:
        return self.machine.on_worker_gone(worker, self.now_s)

    def tick(self) -> list[Action]:
        return self.machine.on_tick(self.now_s)

    def until_started(self) -> Bench:
        self.dispatch()
        self.started()
        return self

    def until_token0(self) -> Bench:
        self.until_started().assign()
        self.tokens(0, 10, worker=P)
        return self

    def until_decoding(self) -> Bench:
        self.until_token0().tokens(0, 10, 11, worker=D)
        return self


def sent(actions: Sequence[Action], kind: type[M]) -> list[tuple[WorkerRef, M]]:
    return [(a.worker, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def of(actions: Sequence[Action], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def emitted(actions: Sequence[Action]) -> list[tuple[int, list[int]]]:
    return [(a.event.index, a.event.token_ids) for a in of(actions, Emit) if isinstance(a.event, TokensEvent)]


def ends(actions: Sequence[Action]) -> list[FinishedEvent]:
    return [a.event for a in of(actions, Emit) if isinstance(a.event, FinishedEvent)]


# --- the good way


def test_a_request_goes_prefill_then_decode_then_end() -> None:
    b = Bench(max_tokens=3)
    [(worker, job)] = sent(b.dispatch(), PrefillJob)
    assert (worker, job.prompt_token_ids, job.will_decode, job.remaining_s) == (P, [1, 2, 3], True, 100.0)
    assert b.started() == [WantDecode()]
    [(worker, decode_job)] = sent(b.assign(), DecodeJob)
    assert (worker, decode_job.prefill_worker_id, decode_job.prefill_generation) == (D, "P", "1")
    assert decode_job.key == job.key
    assert emitted(b.tokens(0, 10, worker=P)) == [(0, [10])]
    assert emitted(b.tokens(0, 10, 11, worker=D)) == [(1, [11])]
    assert emitted(b.tokens(2, 12, worker=D)) == [(2, [12])]
    actions = b.finished(3, worker=D)
    assert actions == [Emit(FinishedEvent(0, "length", None, 3))]
    assert b.machine.phase == "done"


def test_two_attempts_never_share_a_nonce() -> None:
    machines = [SequenceAttempts(Bench().machine.spec, LIMITS) for _ in range(2)]
    keys = set()
    for machine in machines:
        machine.dispatch(P, 0.0, 0)
        assert machine.attempt is not None
        keys.add(machine.attempt.key.nonce)
    assert len(keys) == 2
    assert min(map(len, keys)) >= 16


def test_the_last_token_left_never_involves_a_decode_worker() -> None:
    b = Bench(max_tokens=1)
    [(_, job)] = sent(b.dispatch(), PrefillJob)
    assert not job.will_decode
    assert of(b.started(), WantDecode) == []
    b.tokens(0, 10, worker=P)
    assert ends(b.finished(1, worker=P)) == [FinishedEvent(0, "length", None, 1)]


def test_when_token_0_ends_the_sequence_the_waiting_decode_worker_is_cancelled() -> None:
    b = Bench().until_token0()
    actions = b.finished(1, worker=P, reason="stop")
    assert [worker for worker, _ in sent(actions, Cancel)] == [P, D]
    assert len(ends(actions)) == 1


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt() -> None:
    b = Bench(max_tokens=2)
    [(worker, job)] = sent(b.machine.dispatch_local(D, 0.0, 0), DecodeJob)
    assert (worker, job.prefill_worker_id) == (D, None)
    assert emitted(b.tokens(0, 10, worker=D)) == [(0, [10])]
    assert emitted(b.tokens(1, 11, worker=D)) == [(1, [11])]
    assert len(ends(b.finished(2, worker=D))) == 1


def test_a_lost_started_is_made_up_for_by_token_0() -> None:
    b = Bench()
    b.dispatch()
    actions = b.tokens(0, 10, worker=P)
    assert emitted(actions) == [(0, [10])]
    assert of(actions, WantDecode)


@pytest.mark.parametrize("state", ["running", "leased"])
def test_a_lost_started_is_made_up_for_by_the_roster(state: str) -> None:
    b = Bench()
    b.dispatch()
    assert of(b.at(1.0).roster(P, state), WantDecode)


def test_logprobs_stay_with_their_tokens_when_a_batch_overlaps() -> None:
    b = Bench().until_token0()
    logprobs = [TokenLogprobs(logprob=-float(i), top_token_ids=[], top_logprobs=[]) for i in range(3)]
    item = SequenceTokens(**b.key._asdict(), index=0, token_ids=[10, 11, 12], logprobs=logprobs)
    [emit] = of(b.machine.on_tokens(item, D, 0.0), Emit)
    assert [entry.logprob for entry in emit.event.logprobs] == [-1.0, -2.0]


# --- idempotent tokens


def test_the_decode_workers_repetition_of_token_0_is_dropped_and_not_counted() -> None:
    b = Bench().until_token0()
    assert of(b.tokens(0, 10, worker=D), Dropped) == []
    assert b.tokens(0, 10, worker=D) == [Dropped(1)]


def test_tokens_that_come_again_are_dropped_and_counted() -> None:
    b = Bench().until_decoding()
    assert b.tokens(0, 10, 11, worker=D) == [Dropped(2)]
    assert b.tokens(1, 11, 12, worker=D)[0] == Dropped(1)
    assert b.machine.output == [10, 11, 12]


def test_a_gap_is_asked_for_from_the_wanted_index_and_never_skipped() -> None:
    b = Bench().until_decoding()
    actions = b.tokens(4, 14, worker=D)
    [(worker, resend)] = sent(actions, ResendTokens)
    assert (worker, resend.from_index, emitted(actions)) == (D, 2, [])
    assert emitted(b.tokens(2, 12, 13, 14, worker=D)) == [(2, [12, 13, 14])]


def test_the_same_gap_is_asked_for_again_only_after_a_round_trip() -> None:
    b = Bench().until_decoding()
    assert sent(b.tokens(4, 14, worker=D), ResendTokens)
    assert b.tokens(5, 15, worker=D) == []
    assert sent(b.at(1.0).tokens(6, 16, worker=D), ResendTokens)


def test_finished_waits_for_missing_tokens_and_keeps_asking() -> None:
    b = Bench().until_decoding()
    [(_, resend)] = sent(b.finished(4, worker=D), ResendTokens)
    assert resend.from_index == 2
    assert sent(b.at(1.0).tick(), ResendTokens)
    assert ends(b.tokens(2, 12, worker=D)) == []
    actions = b.tokens(3, 13, worker=D)
    assert emitted(actions) == [(3, [13])]
    assert len(ends(actions)) == 1


def test_a_different_token_at_the_same_index_ends_the_attempt_and_continues_from_what_the_client_has() -> None:
    b = Bench().until_decoding()
    old = b.key
    actions = b.tokens(1, 77, 12, worker=D)
    assert of(actions, Diverged) == [Diverged(1)]
    assert emitted(actions) == []
    assert [(worker, cancel.key) for worker, cancel in sent(actions, Cancel)] == [(D, old)]
    assert of(actions, Requeue)[0].reason == "divergence"
    [(_, job)] = sent(b.dispatch(P2), PrefillJob)
    assert (job.prompt_token_ids, job.num_original_prompt_tokens, job.attempt) == ([1, 2, 3, 10, 11], 3, 2)


def test_finished_with_fewer_tokens_than_the_client_has_is_a_divergence() -> None:
    b = Bench().until_decoding()
    assert of(b.finished(1, worker=D), Diverged)


def test_nothing_of_an_old_attempt_is_heard_any_more() -> None:
    b = Bench().until_decoding()
    old = b.key
    b.gone(D)
    assert b.tokens(2, 12, worker=D, key=old) == []
    b.dispatch(P)
    assert b.tokens(2, 12, worker=P, key=old) == []
    assert b.started(P, key=old) == []
    assert b.machine.output == [10, 11]


def test_only_current_workers_are_heard() -> None:
    b = Bench().until_token0()
    assert b.tokens(1, 55, worker=D2) == []
    assert b.tokens(1, 55, worker=WorkerRef("D", "another generation")) == []


def test_nothing_is_heard_after_the_end() -> None:
    b = Bench(max_tokens=2).until_decoding()
    key = b.key
    assert len(ends(b.finished(2, worker=D))) == 1
    again = Finished(**key._asdict(), worker_id="D", generation="1", finish_reason="length", num_output_tokens=2)
    assert b.machine.on_finished(again, D, 1.0) == []
    assert b.tokens(2, 12, worker=D, key=key) == []
    assert b.machine.on_tick(200.0) == []
    assert b.machine.cancel("client", 200.0) == []


# --- the decode side fails


@pytest.mark.parametrize("reason", ["no_capacity", "draining", "handoff_timeout", "integrity", "restarting"])
def test_another_decode_worker_takes_the_same_attempt_while_the_lease_holds(reason: str) -> None:
    b = Bench().until_token0()
    key = b.key
    actions = b.failed(reason, worker=D)
    assert [worker for worker, _ in sent(actions, Cancel)] == [D]
    assert actions[-1] == WantDecode()
    [(worker, job)] = sent(b.assign(D2), DecodeJob)
    assert (worker, job.key, job.prompt_token_ids, job.prefill_worker_id) == (D2, key, [1, 2, 3], "P")
    assert emitted(b.tokens(0, 10, 11, worker=D2)) == [(1, [11])]
    assert b.tokens(1, 66, worker=D, key=key) == []


def test_a_decode_worker_that_had_the_attempt_is_not_asked_again() -> None:
    b = Bench().until_token0()
    b.failed("no_capacity", worker=D)
    with pytest.raises(AssertionError, match="had r/0#1 before"):
        b.assign(D)


def test_when_all_decode_workers_refused_the_next_attempt_costs_nothing() -> None:
    b = Bench(limits=RetryLimits(max_attempts=1)).until_token0()
    b.failed("no_capacity", worker=D)
    actions = b.machine.no_decode_worker(0.0)
    assert [worker for worker, _ in sent(actions, Cancel)] == [P]
    assert len(of(actions, Requeue)) == 1
    assert b.machine.num_faults == 0


def test_the_lease_bounds_the_wait_for_another_decode_worker() -> None:
    b = Bench().until_token0()
    b.at(5.0).failed("no_capacity", worker=D)
    assert b.at(12.0).tick() == []
    assert of(b.at(13.5).tick(), Requeue)


def test_two_faulty_hand_offs_make_the_prefill_worker_doubtful() -> None:
    b = Bench().until_token0()
    assert WantDecode() in b.failed("handoff_failed", worker=D)
    b.assign(D2)
    actions = b.failed("handoff_failed", worker=D2)
    assert of(actions, Avoid) == [Avoid(D2, P)]
    assert of(actions, Requeue)[0].phase == "handoff"


def test_a_decode_worker_that_dies_while_receiving_is_replaced_and_its_death_counts_for_nothing() -> None:
    b = Bench().until_token0()
    assert b.gone(D)[-1] == WantDecode()
    assert b.machine.num_running_deaths == 0


def test_a_decode_worker_that_dies_while_decoding_costs_an_attempt_from_what_was_emitted() -> None:
    b = Bench().until_decoding()
    actions = b.gone(D)
    assert sent(actions, Cancel) == []
    assert of(actions, Requeue)[0].phase == "decode"
    [(_, job)] = sent(b.dispatch(P), PrefillJob)
    assert job.prompt_token_ids == [1, 2, 3, 10, 11]
    b.started()
    b.assign(D2)
    assert emitted(b.tokens(2, 12, worker=P)) == [(2, [12])]
    assert emitted(b.tokens(2, 12, 13, worker=D2)) == [(3, [13])]


def test_a_finish_of_a_lost_decode_worker_does_not_block_the_next_one() -> None:
    b = Bench().until_token0()
    b.finished(5, worker=D)
    assert b.gone(D)[-1] == WantDecode()
    assert b.machine.attempt is not None
    assert b.machine.attempt.wants_decode


# --- the prefill side fails


def test_prefill_failure_cancels_the_decode_leg_at_once() -> None:
    b = Bench().until_started()
    b.assign()
    actions = b.failed("prefill_failed", worker=P)
    assert D in [worker for worker, _ in sent(actions, Cancel)]
    assert of(actions, Requeue)[0].phase == "prefill"


def test_a_prefill_worker_that_dies_before_token_0_costs_an_attempt() -> None:
    b = Bench().until_started()
    b.assign()
    actions = b.gone(P)
    assert [worker for worker, _ in sent(actions, Cancel)] == [D]
    assert of(actions, Requeue)


def test_a_prefill_worker_that_dies_after_token_0_is_left_to_the_decode_worker_to_judge() -> None:
    b = Bench().until_token0()
    assert of(b.gone(P), Requeue) == []
    assert emitted(b.tokens(0, 10, 11, worker=D)) == [(1, [11])]


def test_without_token_0s_blocks_the_decode_workers_verdict_starts_a_new_attempt() -> None:
    b = Bench().until_token0()
    b.gone(P)
    assert of(b.failed("no_token0", worker=D), Requeue)


def test_a_prefill_worker_that_dies_while_no_decode_worker_is_bound_costs_an_attempt() -> None:
    b = Bench().until_started()
    b.tokens(0, 10, worker=P)
    assert of(b.gone(P), Requeue)


def test_a_verdict_that_trying_again_is_pointless_reaches_the_client() -> None:
    b = Bench().until_started()
    b.assign()
    actions = b.failed("too_long", worker=P, retryable=False)
    [fail] = of(actions, Fail)
    assert (fail.error.status, fail.error.code) == (400, "context_length_exceeded")
    assert [worker for worker, _ in sent(actions, Cancel)] == [D]
    assert b.machine.is_done


# --- bounds


def test_max_attempts_bounds_faults_and_says_so() -> None:
    b = Bench()
    for _ in range(2):
        b.until_started()
        assert of(b.failed("prefill_failed", worker=P), Requeue)
    b.until_started()
    [fail] = of(b.failed("prefill_failed", worker=P), Fail)
    assert (fail.error.status, fail.error.code) == (503, "attempts_exhausted")


@pytest.mark.parametrize("reason", ["no_capacity", "draining"])
def test_refusals_never_use_up_attempts_and_back_off(reason: str) -> None:
    b = Bench()
    pauses = []
    for _ in range(12):
        b.dispatch()
        [requeue] = of(b.failed(reason, worker=P), Requeue)
        pauses.append(requeue.not_before_s - b.now_s)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] == LIMITS.max_backoff_s


def test_two_deaths_with_the_sequence_in_the_running_step_are_enough() -> None:
    b = Bench(limits=RetryLimits(max_attempts=100)).until_decoding()
    assert of(b.gone(D), Requeue)
    b.dispatch(P)
    b.started()
    [fail] = of(b.gone(P), Fail)
    assert (fail.error.status, fail.error.code) == (500, "worker_died")


def test_failures_in_the_running_step_count_like_deaths() -> None:
    b = Bench(limits=RetryLimits(max_attempts=100)).until_decoding()
    assert of(b.failed("step_failed", worker=D, in_step=True), Requeue)
    b.until_started()
    assert of(b.failed("step_failed", worker=P, in_step=True), Fail)


def test_a_death_while_preempted_or_waiting_is_not_in_the_running_step() -> None:
    b = Bench().until_decoding()
    b.at(1.0).roster(D, "preempted", 2)
    b.gone(D)
    b.dispatch(P)
    b.gone(P)
    assert b.machine.num_running_deaths == 0


@pytest.mark.parametrize("phase", ["queued", "dispatched", "prefilling", "handed_off", "decoding"])
def test_the_deadline_ends_every_phase_everywhere(phase: str) -> None:
    b = bench_in(phase)
    actions = b.at(100.0).tick()
    [fail] = of(actions, Fail)
    assert (fail.error.status, fail.error.code) == (504, "deadline_exceeded")
    assert {worker for worker, _ in sent(actions, Cancel)} == HOLDERS[phase]


@pytest.mark.parametrize("phase", ["queued", "dispatched", "prefilling", "handed_off", "decoding"])
def test_cancel_reaches_every_worker_that_may_hold_the_attempt(phase: str) -> None:
    b = bench_in(phase)
    actions = b.machine.cancel("client", 1.0)
    assert {worker for worker, _ in sent(actions, Cancel)} == HOLDERS[phase]
    assert all(cancel.reason == "client" for _, cancel in sent(actions, Cancel))
    assert of(actions, Emit) == of(actions, Fail) == []


HOLDERS: dict[str, set[WorkerRef]] = {
    "queued": set(),
    "dispatched": {P},
    "prefilling": {P, D},
    "handed_off": {P, D},
    "decoding": {D},
}


def bench_in(phase: str) -> Bench:
    b = Bench()
    if phase != "queued":
        b.dispatch()
    if phase not in ("queued", "dispatched"):
        b.started()
        b.assign()
    if phase in ("handed_off", "decoding"):
        b.tokens(0, 10, worker=P)
    if phase == "decoding":
        b.tokens(0, 10, 11, worker=D)
    assert b.machine.phase == phase
    return b


# --- rosters


def test_two_rosters_without_the_sequence_re_dispatch_it() -> None:
    b = Bench()
    b.dispatch()
    assert b.at(1.5).roster(P) == []
    [requeue] = of(b.at(2.5).roster(P), Requeue)
    assert requeue.reason == "lost"
    assert b.machine.num_faults == 0, "a job that never arrived is the bus's loss"


def test_a_worker_that_forgets_a_sequence_it_had_costs_an_attempt() -> None:
    b = Bench().until_decoding()
    b.at(2.0).roster(D)
    assert of(b.at(3.0).roster(D), Requeue)
    assert b.machine.num_faults == 1


def test_after_the_bus_lost_everything_nobody_is_blamed() -> None:
    b = Bench().until_decoding()
    b.at(2.0).roster(D, epoch=1)
    assert of(b.at(3.0).roster(D, epoch=1), Requeue)
    assert b.machine.num_faults == 0


def test_rosters_that_may_be_older_than_the_job_do_not_count() -> None:
    b = Bench().at(10.0)
    b.dispatch()
    assert b.at(10.2).roster(P) == b.at(10.8).roster(P) == []
    assert b.machine.attempt is not None
    assert b.machine.attempt.prefill is not None
    assert b.machine.attempt.prefill.num_absences == 0


def test_rosters_soon_after_an_outage_do_not_count() -> None:
    b = Bench()
    b.dispatch()
    for now_s in (30.1, 30.7):
        assert b.at(now_s).roster(P, up_s=30.0) == []
    assert b.machine.attempt is not None


def test_a_doubled_roster_counts_once_and_a_presence_in_between_counts_anew() -> None:
    b = Bench()
    b.dispatch()
    assert b.at(2.0).roster(P) == b.at(2.01).roster(P) == []
    b.at(3.0).roster(P, "waiting")
    assert b.at(4.0).roster(P) == []
    assert of(b.at(5.0).roster(P), Requeue)


def test_a_lost_decode_job_is_sent_again_before_anything_is_computed_twice() -> None:
    b = Bench().until_token0()
    key = b.key
    b.at(2.0).roster(D)
    [(worker, job)] = sent(b.at(3.0).roster(D), DecodeJob)
    assert (worker, job.key) == (D, key)
    b.at(4.5).roster(D)
    assert of(b.at(5.5).roster(D), WantDecode)


def test_after_the_hand_off_the_prefill_workers_roster_is_not_missed() -> None:
    b = Bench().until_decoding()
    for now_s in (2.0, 3.0, 4.0):
        assert b.at(now_s).roster(P) == []


def test_a_roster_that_is_ahead_is_asked_for_the_rest() -> None:
    b = Bench().until_decoding()
    [(worker, resend)] = sent(b.at(1.0).roster(D, "running", 5), ResendTokens)
    assert (worker, resend.from_index) == (D, 2)


def test_a_lost_finished_is_asked_for_when_the_roster_says_finished() -> None:
    b = Bench(max_tokens=2).until_decoding()
    assert sent(b.at(1.0).roster(D, "finished", 2), ResendTokens)
    assert len(ends(b.finished(2, worker=D))) == 1


def test_a_released_hand_off_in_the_prefill_workers_roster_is_nothing_to_ask_for() -> None:
    b = Bench().until_decoding()
    assert b.at(1.0).roster(P, "finished", 1) == []


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "expected"),
    [
        ((11, 12), 3, FinishedEvent(0, "length", None, 3)),
        ((11, 99), 8, FinishedEvent(0, "stop", 99, 3)),
    ],
)
def test_a_whole_answer_whose_worker_died_before_saying_so_is_finished_not_continued(
    tokens: tuple[int, ...], max_tokens: int, expected: FinishedEvent
) -> None:
    b = Bench(max_tokens=max_tokens).until_token0()
    b.tokens(1, *tokens, worker=D)
    actions = b.gone(D)
    assert ends(actions) == [expected]
    assert of(actions, Requeue) == []


def test_an_ignored_end_of_sequence_token_is_no_end() -> None:
    b = Bench(ignore_eos=True).until_token0()
    b.tokens(1, 99, worker=D)
    assert of(b.gone(D), Requeue)


# --- progress


def test_silence_for_the_progress_timeout_re_dispatches() -> None:
    b = Bench().until_decoding()
    assert b.at(19.0).tick() == []
    actions = b.at(21.0).tick()
    assert of(actions, Requeue)[0].reason == "no_progress"
    assert of(actions, Avoid) == [Avoid(D)]


def test_a_decode_worker_that_only_claims_to_run_makes_no_progress() -> None:
    b = Bench().until_decoding()
    for now_s in range(1, 21):
        b.at(float(now_s)).roster(D, "running", 2)
    assert of(b.at(21.0).tick(), Requeue)


def test_waiting_in_a_workers_queue_is_not_silence() -> None:
    b = Bench()
    b.dispatch()
    for now_s in range(1, 60):
        b.at(float(now_s)).roster(P, "waiting")
        assert b.tick() == []


def test_an_outage_of_the_bus_is_nobodys_silence() -> None:
    b = Bench().until_decoding()
    for now_s in range(1, 60):
        b.at(float(now_s)).machine.hold(float(now_s))
        assert b.tick() == []
