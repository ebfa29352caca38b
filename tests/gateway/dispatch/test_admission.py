"""Who is not let in, and what they are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.gateway.dispatch.admission import AdmissionLimits, ServiceView, check
from pdserve.gateway.generation.request import GenerationRequest
from pdserve.sampling_params import SamplingParams

CALM = ServiceView(
    now_s=0.0,
    num_queued_requests=0,
    num_queued_tokens=0,
    max_total_tokens=100,
    has_workers=True,
    is_stream_full=False,
    num_tokens_ahead=0,
    prefill_tokens_per_s=0.0,
    bus_down_s=0.0,
    is_draining=False,
)
LIMITS = AdmissionLimits(max_queue_requests=10, max_queue_tokens=1000, bus_timeout_s=2.0)


def request(num_tokens: int = 10, max_tokens: int = 10) -> GenerationRequest:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    return GenerationRequest("r", [1] * num_tokens, 1, sampling, deadline_s=60.0, received_s=0.0)


def test_a_calm_service_lets_everyone_in_up_to_the_last_token() -> None:
    assert check(request(90, 10), CALM, LIMITS) is None


def test_what_can_never_fit_is_400_with_the_three_numbers() -> None:
    refusal = check(request(91, 10), CALM, LIMITS)
    assert refusal is not None
    assert (refusal.error.status, refusal.error.param) == (400, "max_tokens")
    assert all(number in refusal.error.message for number in ("91", "10", "100"))
    too_long = check(request(100, 1), CALM, LIMITS)
    assert too_long is not None
    assert too_long.error.param == "prompt"


@pytest.mark.parametrize(
    ("changes", "reason", "status"),
    [
        ({"is_draining": True}, "draining", 503),
        ({"bus_down_s": 2.1}, "bus", 503),
        ({"has_workers": False, "max_total_tokens": None}, "no_workers", 503),
        ({"num_queued_requests": 10}, "queue_requests", 429),
        ({"num_queued_requests": 1, "num_queued_tokens": 991}, "queue_tokens", 429),
        ({"is_stream_full": True}, "stream_full", 429),
        ({"num_tokens_ahead": 6100, "prefill_tokens_per_s": 100.0}, "deadline", 429),
    ],
)
def test_overload_and_absence_say_when_to_come_back(changes: dict[str, object], reason: str, status: int) -> None:
    refusal = check(request(), replace(CALM, **changes), LIMITS)  # type: ignore[arg-type]
    assert refusal is not None
    assert (refusal.reason, refusal.error.status) == (reason, status)
    assert refusal.error.retry_after_s is not None
    assert refusal.error.retry_after_s >= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"bus_down_s": 1.9},
        {"num_queued_requests": 9},
        {"num_queued_tokens": 5000},
        {"num_tokens_ahead": 5900, "prefill_tokens_per_s": 100.0},
        {"num_tokens_ahead": 10**9, "prefill_tokens_per_s": 0.0},
    ],
)
def test_nobody_is_refused_below_a_bound_or_on_an_unmeasured_rate(changes: dict[str, object]) -> None:
    assert check(request(), replace(CALM, **changes), LIMITS) is None  # type: ignore[arg-type]


def test_requests_are_held_for_a_pool_that_scales_from_zero_up_to_a_bound() -> None:
    empty = replace(CALM, has_workers=False, max_total_tokens=None)
    holding = replace(LIMITS, max_held_requests=3)
    assert check(request(), replace(empty, num_queued_requests=2), holding) is None
    assert check(request(), replace(empty, num_queued_requests=3), holding) is not None
