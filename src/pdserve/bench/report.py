"""A benchmark's result as a table for people and as JSON for machines. Pure: never measures, never prints.

The JSON holds everything needed to repeat the benchmark and to recompute its numbers: parameters, seed,
machine, versions, and per request every arrival.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pdserve.bench.benchmark import BenchResult, Run
from pdserve.bench.environment import describe_machine, describe_versions, source_revision
from pdserve.bench.options import BenchOptions
from pdserve.bench.record import RequestRecord
from pdserve.bench.summary import RunSummary, Slos

SCHEMA = "pdserve-bench/1"
_ROWS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("handoff_gap", "hand-off gap"), ("e2e", "E2E"))
_MAX_LAG_S = 0.01
"""A client later than this at p99 disturbs what it measures."""


def table(result: BenchResult, options: BenchOptions) -> str:
    """What `pdserve bench` prints: milliseconds, medians over runs."""
    median = result.median
    lines = [
        f"{result.model} at {result.url}: {options.pattern}, {len(result.runs)} run(s), medians",
        "",
        f"{'ms':<14}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}",
    ]
    for name, label in _ROWS:
        d = median.latencies_s[name]
        lines.append(f"{label:<14}" + "".join(f"{_ms(v):>10}" for v in (d.mean, d.p50, d.p90, d.p95, d.p99)))
    return "\n".join([*lines, "", *_totals(median, options.slos), *_warnings(median)])


def _totals(median: RunSummary, slos: Slos) -> list[str]:
    lines = [
        f"throughput     {median.output_tokens_per_s:.1f} output tok/s, {median.total_tokens_per_s:.1f} tok/s with "
        f"prompts, {median.requests_per_s:.2f} requests/s",
        f"requests       {median.num_sent} sent, {median.num_failed} failed",
        f"tokens         {median.prompt_tokens} prompt ({median.cached_tokens} cached), {median.output_tokens} output",
    ]
    if slos.ttft_s is not None or slos.tpot_s is not None:
        wanted = [f"{name} <= {slo * 1000:g} ms" for name, slo in (("TTFT", slos.ttft_s), ("TPOT", slos.tpot_s)) if slo]
        lines.append(
            f"goodput        {median.good_ratio:.1%} of all sent, {median.good_per_s:.2f} requests/s "
            f"({', '.join(wanted)}; failures are misses)"
        )
    return lines


def _warnings(median: RunSummary) -> list[str]:
    warnings = []
    if not median.has_token_times:
        warnings.append("note: the server does not tell token ids, so ITL and hand-off gap are between events")
    if median.latencies_s["lag"].p99 > _MAX_LAG_S:
        lag = _ms(median.latencies_s["lag"].p99)
        warnings.append(f"warning: this client sent requests up to {lag} ms late (p99); it may be what is measured")
    warnings += [f"failed {count} x {error}" for error, count in sorted(median.errors.items())[:5]]
    return warnings


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f}"


def as_json(result: BenchResult, options: BenchOptions) -> dict[str, Any]:
    """The full record as JSON values; schema `pdserve-bench/1`."""
    return {
        "schema": SCHEMA,
        "started_at": datetime.fromtimestamp(result.started_at, UTC).isoformat(timespec="seconds"),
        "url": result.url,
        "model": result.model,
        "dtype": options.dtype or _find_dtype(result.server),
        "server": result.server,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "revision": source_revision(),
        "parameters": options.as_dict(),
        "pattern": options.pattern,
        "trace": _trace_json(result),
        "median": _summary_json(result.median),
        "runs": [_run_json(run) for run in result.runs],
    }


def _find_dtype(server: dict[str, Any]) -> str | None:
    model = server.get("model") or {}
    dtype = server.get("dtype") or (model.get("dtype") if isinstance(model, dict) else None)
    return None if dtype is None else str(dtype)


def _trace_json(result: BenchResult) -> dict[str, Any] | None:
    trace = result.trace
    if trace is None:
        return None
    return {"num_requests": len(trace.requests), "columns": trace.columns, "unit": trace.unit, "bin_s": trace.bin_s}


def _summary_json(summary: RunSummary) -> dict[str, Any]:
    values = asdict(summary)
    values["latencies_s"] = {name: distribution.as_dict() for name, distribution in summary.latencies_s.items()}
    return values


def _run_json(run: Run) -> dict[str, Any]:
    start_s = min(record.sent_s for record in run.records)
    return {"summary": _summary_json(run.summary), "requests": [_record_json(r, start_s) for r in run.records]}


def _record_json(record: RequestRecord, start_s: float) -> dict[str, Any]:
    """Times in seconds after the run's first request; arrivals as [time, tokens]."""
    return {
        "scheduled_s": round(record.scheduled_s - start_s, 6),
        "sent_s": round(record.sent_s - start_s, 6),
        "end_s": round(record.end_s - start_s, 6),
        "arrivals": [[round(at_s - start_s, 6), num_tokens] for at_s, num_tokens in record.arrivals],
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_output_tokens": record.num_output_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }
