from __future__ import annotations

import math

import pytest

from pdserve.bench.record import Arrival, RequestRecord
from pdserve.bench.summary import Slos, median_of, summarise


def record(*arrivals: tuple[float, int | None], sent_s: float = 10.0, num: int | None = None, error: str | None = None):
    counted = sum(n or 1 for _, n in arrivals) if num is None else num
    end_s = arrivals[-1][0] if arrivals else sent_s + 1
    return RequestRecord(
        scheduled_s=sent_s,
        sent_s=sent_s,
        end_s=end_s,
        arrivals=tuple(Arrival(*a) for a in arrivals),
        num_prompt_tokens=5,
        num_output_tokens=counted,
        error=error,
    )


def test_tpot_is_the_rest_of_the_time_over_tokens_less_one() -> None:
    r = record((10.5, 1), (10.75, 1), (11.5, 3))
    assert r.ttft_s == pytest.approx(0.5)
    assert r.e2e_s == pytest.approx(1.5)
    assert r.tpot_s == pytest.approx((1.5 - 0.5) / 4)


def test_tokens_of_one_event_have_no_gap_between_them() -> None:
    r = record((10.5, 1), (10.75, 1), (11.5, 3))
    assert r.itl_s == pytest.approx([0.25, 0.75, 0.0, 0.0])
    assert sum(r.itl_s) == pytest.approx(r.e2e_s - r.ttft_s)
    assert r.handoff_gap_s == pytest.approx(0.25)


def test_two_first_tokens_in_one_event_have_a_hand_off_gap_of_zero() -> None:
    assert record((10.5, 2), (10.75, 1)).handoff_gap_s == 0.0


def test_one_token_has_neither_tpot_nor_gap() -> None:
    r = record((10.5, 1))
    assert math.isnan(r.tpot_s)
    assert math.isnan(r.handoff_gap_s)
    assert r.itl_s == []
    assert r.meets(0.6, 0.001), "a single token cannot miss a TPOT"


def test_tpot_counts_tokens_from_usage_where_events_hide_them() -> None:
    assert record((10.0, None), (11.0, None), num=11).tpot_s == pytest.approx(0.1)


def test_goodput_is_judged_over_all_sent_and_failures_are_misses() -> None:
    good = record((10.1, 1), (10.2, 1), (10.3, 1))
    late_first = record((10.9, 1), (11.0, 1))
    slow = record((10.1, 1), (11.1, 1))
    failed = record((10.1, 1), error="HTTP 500")
    never = record(error="refused")
    summary = summarise([good, late_first, slow, failed, never], Slos(0.5, 0.2))
    assert summary.good_ratio == pytest.approx(1 / 5)
    assert summary.good_per_s == pytest.approx(1 / summary.duration_s)
    assert (summary.num_sent, summary.num_failed) == (5, 2)
    assert summary.errors == {"HTTP 500": 1, "refused": 1}


def test_without_slos_every_complete_answer_is_good() -> None:
    assert summarise([record((10.1, 1)), record(error="x")], Slos()).good_ratio == 0.5


def test_throughput_is_of_tokens_between_first_send_and_last_byte() -> None:
    records = [record((11.0, 1), (12.0, 1)), record((13.0, 1), (14.0, 2), sent_s=12.0)]
    summary = summarise(records, Slos())
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.output_tokens_per_s == pytest.approx(5 / 4)
    assert summary.requests_per_s == pytest.approx(2 / 4)
    assert summary.total_tokens_per_s == pytest.approx((5 + 10) / 4)


def test_medians_are_over_runs_and_counts_are_sums() -> None:
    runs = [summarise([record((10.0 + ttft, 1), (11.0, 1))], Slos()) for ttft in (0.1, 0.3, 0.9)]
    median = median_of(runs)
    assert median.latencies_s["ttft"].p50 == pytest.approx(0.3)
    assert (median.num_sent, median.output_tokens) == (3, 6)


def test_a_run_in_which_everything_failed_is_still_a_result() -> None:
    summary = median_of([summarise([record(error="x")], Slos(1, 1))])
    assert summary.good_ratio == 0.0
    assert math.isnan(summary.latencies_s["ttft"].p99)
