"""The waterfall adds up, whatever workers report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.generation.waterfall import Waterfall

MICROSECOND = 1e-6


def approx(expected: object) -> object:
    return pytest.approx(expected, abs=3 * MICROSECOND)


duration = st.floats(0, 1000, allow_nan=False)


def story(
    *,
    frontend: float = 0.1,
    queue: float = 0.2,
    schedule: float = 0.3,
    prefill: float = 0.4,
    token0: float = 1.0,
    write: float | None = 0.05,
    gap: float = 0.5,
    rest: float = 2.0,
) -> Waterfall:
    w = Waterfall(received_s=100.0)
    w.note_queued(100.0 + frontend)
    dispatched_s = 100.0 + frontend + queue
    w.note_dispatched(0, dispatched_s)
    w.note_schedule(0, schedule)
    w.note_prefill(0, schedule, prefill)
    w.note_token(0, 0, dispatched_s + token0)
    if write is not None:
        w.note_first_write(dispatched_s + token0 + write)
    w.note_token(0, 1, dispatched_s + token0 + gap)
    w.note_transfer(0, 0.02, 4096)
    w.note_end(dispatched_s + token0 + gap + rest)
    return w


def test_every_stage_gets_its_own_time() -> None:
    w = story()
    stages = (w.frontend_s, w.queue_s, w.schedule_s, w.prefill_s, w.publish_s)
    assert stages == approx((0.1, 0.2, 0.3, 0.4, 0.35))
    assert (w.handoff_gap_s, w.decode_s) == approx((0.5, 2.45))
    assert (w.transfer_s, w.transfer_bytes) == (0.02, 4096)


@given(duration, duration, duration, duration, duration, st.none() | duration, duration, duration)
def test_the_two_sums_are_exact_and_no_stage_is_negative(
    frontend: float,
    queue: float,
    schedule: float,
    prefill: float,
    token0: float,
    write: float | None,
    gap: float,
    rest: float,
) -> None:
    w = story(
        frontend=frontend,
        queue=queue,
        schedule=schedule,
        prefill=prefill,
        token0=token0,
        write=write,
        gap=gap,
        rest=rest,
    )
    timing = w.as_timing()
    stages = [timing[name] for name in ("frontend_s", "queue_s", "schedule_s", "prefill_s", "publish_s")]
    assert timing["ttft_s"] == math.fsum(stages) == sum(stages) == sum(reversed(stages))
    assert timing["total_s"] == timing["ttft_s"] + timing["decode_s"] == math.fsum([*stages, timing["decode_s"]])
    assert min(timing.values()) >= 0
    assert timing["handoff_gap_s"] <= timing["decode_s"]
    measured_s = frontend + queue + token0 + (write or 0.0)
    assert timing["ttft_s"] == pytest.approx(measured_s, abs=5e-6)
    ended_s = max(measured_s, frontend + queue + token0 + gap + rest)
    assert timing["total_s"] == pytest.approx(ended_s, abs=5e-6)


def test_reports_longer_than_their_window_are_scaled_together() -> None:
    w = story(schedule=3.0, prefill=1.0, token0=1.0, write=0.0)
    assert (w.schedule_s, w.prefill_s, w.publish_s) == approx((0.75, 0.25, 0.0))


def test_an_answer_in_one_piece_has_its_first_token_when_the_gateway_has_it() -> None:
    assert story(write=None).ttft_s == approx(1.3)


def test_a_lost_attempt_before_token_0_counts_as_queue() -> None:
    w = Waterfall(received_s=0.0)
    w.note_queued(0.0)
    w.note_dispatched(0, 1.0)
    w.note_schedule(0, 0.9)
    w.note_dispatched(0, 5.0)
    w.note_schedule(0, 0.1)
    w.note_token(0, 0, 6.0)
    assert (w.queue_s, w.schedule_s, w.publish_s) == approx((5.0, 0.1, 0.9))


def test_after_token_0_later_attempts_and_other_choices_change_nothing() -> None:
    w = story()
    before = w.as_timing()
    w.note_dispatched(0, 900.0)
    w.note_schedule(0, 50.0)
    w.note_dispatched(1, 900.0)
    w.note_prefill(1, 9.0, 9.0)
    w.note_token(1, 0, 901.0)
    w.note_token(1, 1, 902.0)
    w.note_transfer(1, 9.0, 9)
    w.note_first_write(999.0)
    assert w.as_timing() == before


def test_the_choice_that_answers_first_tells_the_story() -> None:
    w = Waterfall(received_s=0.0)
    w.note_queued(0.0)
    for choice in (0, 1):
        w.note_dispatched(choice, 1.0)
    w.note_prefill(1, 0.2, 0.3)
    w.note_token(1, 0, 2.0)
    w.note_token(0, 0, 3.0)
    w.note_token(1, 1, 2.5)
    w.note_end(4.0)
    assert (w.schedule_s, w.prefill_s, w.ttft_s, w.handoff_gap_s) == approx((0.2, 0.3, 2.0, 0.5))


def test_a_request_that_never_got_a_token_still_adds_up() -> None:
    w = Waterfall(received_s=1.0)
    w.note_queued(1.5)
    assert w.as_timing()["total_s"] == w.as_timing()["ttft_s"] == 0.5
