"""The state machine of one sequence and what it hears, or does not hear, of its workers: rosters and progress."""

from __future__ import annotations

from attempt_bench import Bench, D, P, ends, of, sent

from pdserve.gateway.dispatch import recovery
from pdserve.gateway.dispatch.actions import Avoid, Requeue, WantDecode
from pdserve.messages import (
    DecodeJob,
    ResendTokens,
)

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
        recovery.on_bus_down(b.at(float(now_s)).machine, float(now_s))
        assert b.tick() == []
