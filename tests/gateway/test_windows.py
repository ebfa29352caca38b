"""What is outstanding where."""

from __future__ import annotations

from pdserve.gateway.actions import WorkerRef
from pdserve.gateway.windows import Windows

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
    assert windows.is_empty


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
    windows.release(A, "old")
    windows.release(A, "new")
    assert (windows.total(A), windows.unsettled(A)) == (0, 0)
