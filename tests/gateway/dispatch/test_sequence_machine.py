"""The state machine of one sequence, rule by rule: the good way, and tokens that come as they like."""

from __future__ import annotations

import pytest
from attempt_bench import D2, LIMITS, P2, Bench, D, P, emitted, ends, hear_tokens, of, sent

from pdserve.gateway.dispatch import recovery
from pdserve.gateway.dispatch.actions import Diverged, Dropped, Emit, Requeue, WantDecode
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import FinishedEvent, Sender
from pdserve.messages import (
    Cancel,
    DecodeJob,
    Finished,
    PrefillJob,
    ResendTokens,
    SequenceTokens,
    TokenLogprobs,
)
from pdserve.reasons import CancelReason, SequenceState
from pdserve.registration import WorkerRef

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
    machines = [SequenceMachine(Bench().machine.request, 0, Sender("gw", "f"), LIMITS) for _ in range(2)]
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
    [emit] = of(hear_tokens(b.machine, item, D, 0.0), Emit)
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


def decode_state(b: Bench) -> SequenceState:
    assert b.machine.attempt is not None
    assert b.machine.attempt.decode is not None
    return b.machine.attempt.decode.state


@pytest.mark.parametrize(
    ("index", "token_ids"), [(0, [10]), (0, [10, 11]), (1, [11])], ids=["token 0", "all of them", "the last"]
)
def test_tokens_that_come_again_do_not_tell_that_a_preempted_sequence_runs(index: int, token_ids: list[int]) -> None:
    b = Bench().until_decoding()
    b.roster(D, "waiting", 2)
    b.tokens(index, *token_ids, worker=D)
    assert decode_state(b) == "waiting"
    b.gone(D)
    assert b.machine.num_running_deaths == 0, "it was in no step that could have ended the worker"


@pytest.mark.parametrize(("index", "token_ids"), [(2, [12]), (1, [11, 12]), (0, [10, 11, 12, 13])])
def test_a_new_token_tells_that_a_preempted_sequence_runs_again(index: int, token_ids: list[int]) -> None:
    b = Bench().until_decoding()
    b.roster(D, "waiting", 2)
    b.tokens(index, *token_ids, worker=D)
    assert decode_state(b) == "running"
    b.gone(D)
    assert b.machine.num_running_deaths == 1


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
    assert recovery.on_tick(b.machine, 200.0) == []
    assert b.machine.cancel(CancelReason.CLIENT) == []
