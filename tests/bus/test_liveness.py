"""Pure state about the connection: the same server or another, and how long a reader was deaf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bus.keys import Keys
from pdserve.bus.liveness import Deafness, ServerWatch


def test_the_continuous_connection_starts_anew_after_every_silence() -> None:
    watch = ServerWatch()
    assert not watch.answered("a", 1.0)
    assert watch.up_since_s == 1.0
    watch.answered("a", 2.0)
    assert watch.up_since_s == 1.0
    watch.lost()
    assert not watch.is_up
    assert not watch.answered("a", 5.0)
    assert (watch.up_since_s, watch.num_reconnects) == (5.0, 1)


def test_another_server_is_told_even_without_a_silence() -> None:
    watch = ServerWatch()
    watch.answered("a", 1.0)
    assert watch.answered("b", 2.0)
    assert (watch.run_id, watch.up_since_s, watch.num_reconnects) == ("b", 2.0, 1)


def test_silence_within_the_blocking_time_is_not_deafness() -> None:
    deafness = Deafness(silence_s=1.0, last_heard_s=0.0)
    assert deafness.total_s(1.0) == 0
    assert not deafness.is_deaf(1.0)
    deafness.heard(1.0)
    assert deafness.total_s(2.0) == 0


def test_a_hung_connection_counts_from_the_end_of_the_blocking_time() -> None:
    deafness = Deafness(silence_s=1.0, last_heard_s=0.0)
    assert deafness.is_deaf(1.5)
    assert deafness.total_s(3.0) == 2
    deafness.lost(3.0)
    assert deafness.total_s(4.0) == 3
    deafness.heard(5.0)
    assert not deafness.is_deaf(5.0)
    assert deafness.total_s(5.5) == 4


def test_a_broken_connection_counts_at_once() -> None:
    deafness = Deafness(silence_s=1.0, last_heard_s=0.0)
    deafness.lost(0.25)
    deafness.lost(2.0)
    assert deafness.total_s(2.25) == 2


@given(st.lists(st.tuples(st.sampled_from(["heard", "lost", "look"]), st.floats(0.001, 3.0)), max_size=40))
def test_deaf_time_never_runs_backwards_and_never_faster_than_the_clock(steps: list[tuple[str, float]]) -> None:
    deafness, now_s, total_s = Deafness(silence_s=0.75, last_heard_s=0.0), 0.0, 0.0
    for step, elapsed_s in steps:
        now_s += elapsed_s
        if step != "look":
            getattr(deafness, step)(now_s)
        assert total_s - 1e-9 <= deafness.total_s(now_s) <= total_s + elapsed_s + 1e-9
        total_s = deafness.total_s(now_s)


def test_all_keys_of_a_service_share_one_hash_tag() -> None:
    keys = Keys("blue")
    assert keys.workers == "pds:{blue}:workers"
    assert keys.worker("p1") == "pds:{blue}:worker:p1"
    assert keys.gateways == "pds:{blue}:gateways"
    assert keys.gateway("g1") == "pds:{blue}:gateway:g1"
    assert keys.inbox("p1", "abc") == "pds:{blue}:inbox:p1:abc"
    assert keys.tokens("g1") == "pds:{blue}:tokens:g1"


@pytest.mark.parametrize("service", ["", "{a}", "a}"])
def test_a_service_name_that_would_break_the_hash_tag_is_a_programming_error(service: str) -> None:
    with pytest.raises(AssertionError, match="bad service name"):
        Keys(service)
