"""Turns records of requests into the numbers of a report: percentiles, throughput, goodput, medians over runs. Pure.

Goodput is judged over everything that was *sent*: a failed request is a miss, never an absent one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.bench.percentiles import Distribution
from pdserve.bench.record import RequestRecord

_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Slos:
    """Service level objectives, in seconds; None = not judged."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run's numbers. Latencies are of successful requests only; goodput is of all sent."""

    num_sent: int
    num_failed: int
    duration_s: float
    """First request sent to last byte received."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_ratio: float
    good_per_s: float
    latencies_s: dict[str, Distribution]
    """ttft, tpot, itl, handoff_gap, e2e; lag = how late the client was."""
    has_token_times: bool
    errors: dict[str, int]


def summarise(records: Sequence[RequestRecord], slos: Slos) -> RunSummary:
    """The numbers of one run; goodput by `slos`."""
    assert records, "a run has at least one request"
    answered = [record for record in records if record.is_ok]
    start_s, end_s = min(record.sent_s for record in records), max(record.end_s for record in records)
    duration_s = max(end_s - start_s, 1e-9)
    num_good = sum(record.meets(slos.ttft_s, slos.tpot_s) for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    output_tokens = sum(record.num_output_tokens for record in answered)
    return RunSummary(
        num_sent=len(records),
        num_failed=len(records) - len(answered),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.num_cached_tokens for record in answered),
        output_tokens=output_tokens,
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        good_ratio=num_good / len(records),
        good_per_s=num_good / duration_s,
        latencies_s=_latencies(answered, records),
        has_token_times=all(record.has_token_times for record in answered),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
    )


def _latencies(answered: Sequence[RequestRecord], sent: Sequence[RequestRecord]) -> dict[str, Distribution]:
    def of(value: Callable[[RequestRecord], float]) -> Distribution:
        return Distribution.of(v for v in map(value, answered) if not math.isnan(v))

    return {
        "ttft": of(lambda record: record.ttft_s),
        "tpot": of(lambda record: record.tpot_s),
        "itl": Distribution.of(gap for record in answered for gap in record.itl_s),
        "handoff_gap": of(lambda record: record.handoff_gap_s),
        "e2e": of(lambda record: record.e2e_s),
        "lag": Distribution.of(record.lag_s for record in sent),
    }


def median_of(runs: Sequence[RunSummary]) -> RunSummary:
    """Each number's median over runs; counts of requests, tokens and errors are sums."""
    assert runs, "at least one run"
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run.errors)
    return RunSummary(
        num_sent=sum(run.num_sent for run in runs),
        num_failed=sum(run.num_failed for run in runs),
        duration_s=statistics.median(run.duration_s for run in runs),
        prompt_tokens=sum(run.prompt_tokens for run in runs),
        cached_tokens=sum(run.cached_tokens for run in runs),
        output_tokens=sum(run.output_tokens for run in runs),
        requests_per_s=statistics.median(run.requests_per_s for run in runs),
        output_tokens_per_s=statistics.median(run.output_tokens_per_s for run in runs),
        total_tokens_per_s=statistics.median(run.total_tokens_per_s for run in runs),
        good_ratio=statistics.median(run.good_ratio for run in runs),
        good_per_s=statistics.median(run.good_per_s for run in runs),
        latencies_s={name: _median([run.latencies_s[name] for run in runs]) for name in runs[0].latencies_s},
        has_token_times=all(run.has_token_times for run in runs),
        errors=dict(errors),
    )


def _median(distributions: Sequence[Distribution]) -> Distribution:
    def middle(name: str) -> float:
        values = [getattr(d, name) for d in distributions if not math.isnan(getattr(d, name))]
        return statistics.median(values) if values else math.nan

    return Distribution(sum(d.num for d in distributions), *(middle(name) for name in _PERCENTILES))
