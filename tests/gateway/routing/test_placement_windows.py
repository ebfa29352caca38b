"""What is outstanding where."""

from __future__ import annotations

from pdserve.gateway.routing.placement import Windows
from pdserve.registration import WorkerRef

A, B = WorkerRef("a", "1"), WorkerRef("b", "1")


def test_holdings_are_summed_per_worker_and_given_back_once() -> None:
    windows = Windows(settle_after_s=0.25)
    windows.take(A, "x", 10, 0.0)
    windows.take(A, "y", 5, 0.0)
    windows.take(B, "x", 7, 0.0)
    assert (windows.total(A), windows.total(B)) == (15, 7)
    windows.release(A, "x")
    windows.release(A, "x")
    assert windows.total(A) == 5
    windows.release(A, "y")
    assert not windows.has_any(A)
    windows.release(B, "x")
    assert not windows.has_any(B)


def test_taking_again_under_the_same_key_replaces() -> None:
    windows = Windows(settle_after_s=0.25)
    windows.take(A, "x", 10, 0.0)
    windows.take(A, "x", 3, 1.0)
    assert (windows.total(A), windows.unsettled(A), windows.num_unsettled(A)) == (3, 3, 1)


def test_a_newer_registration_includes_what_had_time_to_arrive() -> None:
    windows = Windows(settle_after_s=0.25)
    windows.take(A, "old", 10, 0.0)
    windows.take(A, "new", 5, 0.9)
    windows.refresh(A, 1.0)
    assert (windows.total(A), windows.unsettled(A), windows.num_unsettled(A)) == (15, 5, 1)


def test_what_ends_between_two_heartbeats_is_credited_until_the_next_one() -> None:
    windows = Windows(settle_after_s=0.25)
    windows.take(A, "old", 10, 0.0)
    windows.refresh(A, 1.0)
    windows.release(A, "old")
    assert (windows.total(A), windows.unsettled(A), windows.has_any(A)) == (0, -10, False)
    windows.take(A, "new", 4, 1.1)
    assert windows.unsettled(A) == -6
    windows.refresh(A, 2.0)
    assert (windows.total(A), windows.unsettled(A)) == (4, 0)


def test_a_worker_that_is_gone_owes_nothing() -> None:
    windows = Windows(settle_after_s=0.25)
    windows.take(A, "x", 10, 0.0)
    windows.forget(A)
    windows.release(A, "x")
    assert (windows.total(A), windows.has_any(A)) == (0, False)
