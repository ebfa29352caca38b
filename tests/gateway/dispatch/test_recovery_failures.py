"""The state machine of one sequence when a worker fails: who is replaced, what it costs, and where it ends."""

from __future__ import annotations

import pytest
from attempt_bench import D2, LIMITS, Bench, D, P, emitted, ends, of, sent

from pdserve.gateway.dispatch import recovery
from pdserve.gateway.dispatch.actions import Avoid, Emit, Fail, Requeue, WantDecode
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.generation.request import FinishedEvent
from pdserve.messages import (
    Cancel,
    DecodeJob,
    PrefillJob,
)
from pdserve.reasons import CancelReason
from pdserve.registration import WorkerRef

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
    actions = recovery.on_all_refused(b.machine, 0.0)
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
    assert b.machine.wants_decode


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


def test_a_death_while_waiting_is_not_in_the_running_step() -> None:
    b = Bench().until_decoding()
    b.at(1.0).roster(D, "waiting", 2)
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
    actions = b.machine.cancel(CancelReason.CLIENT)
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
