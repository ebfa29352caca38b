"""A whole service through HTTP: gateway, prefill and decode worker on this machine's cores, as `pdserve up` runs them.

Measures throughput and latency under load, and what a long prompt does to streams that are running: the reason why
prefill and decode are different processes. With --layouts: how threads, niceness and pinning share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.layouts import UP, Layout, Services
from benchmarks.report import Row, at_least, at_most, median_row, parser, publish, warn_when_busy
from benchmarks.service_load import Interference, Load

from pdserve.bench.percentiles import Distribution
from pdserve.bench.record import RequestRecord
from pdserve.bench.summary import Slos, summarise

Figures = dict[tuple[str, str, str], list[float]]
"""(case, metric, unit) → one figure per run."""
DEFAULT_LAYOUTS = "p1d2,p1d2+nice10,p1d2+nice19,p2d2,p2d2+nice10,p1d1,p1d1+pin"
TARGETS = {
    "16 streams / 1 stream": at_least(2.5),
    "longest gap of running streams": at_most(1.5),
    "longest gap / time of the prompt": at_most(0.1),
}


async def throughput(load: Load, scale: float) -> Figures:
    """Concurrency 16, 512 tokens in, 128 out."""
    input_tokens, output_tokens = _scaled(512, scale), _scaled(128, scale)
    case = f"16 at a time, {input_tokens} in / {output_tokens} out"
    records = await load.closed(16, 32, input_tokens, output_tokens)
    summary = summarise(records, Slos())
    ttft, tpot = summary.latencies_s["ttft"], summary.latencies_s["tpot"]
    return {
        (case, "output throughput", "tok/s"): [summary.output_tokens_per_s],
        (case, "TTFT p50", "s"): [ttft.p50],
        (case, "TTFT p99", "s"): [ttft.p99],
        (case, "TPOT p50", "ms"): [tpot.p50 * 1e3],
    }


async def interference(load: Load, scale: float) -> Figures:
    """8 running streams when three 2,000-token prompts arrive."""
    prompt_tokens = _scaled(2000, scale)
    case = f"8 streams, three {prompt_tokens}-token prompts arrive"
    result = await load.interfere(
        8, [prompt_tokens] * 3, stream_input=_scaled(64, scale), stream_output=_scaled(1000, scale), calm_tokens=16
    )
    _note_when_not_covered(case, result)
    calm, disturbed = Distribution.of(result.calm_gaps_s), Distribution.of(result.disturbed_gaps_s)
    return {
        (case, "ITL p50 before", "ms"): [calm.p50 * 1e3],
        (case, "ITL p99 before", "ms"): [calm.p99 * 1e3],
        (case, "ITL p50 while computed", "ms"): [disturbed.p50 * 1e3],
        (case, "ITL p99 while computed", "ms"): [disturbed.p99 * 1e3],
        (case, "longest gap while computed", "ms"): [disturbed.max * 1e3],
        (case, "TTFT of the last prompt", "s"): [max(record.ttft_s for record in result.arrived)],
    }


async def scaling(load: Load, scale: float) -> Figures:
    """What 16 streams get done together, against one alone."""
    input_tokens, output_tokens = _scaled(64, scale), _scaled(128, scale)
    case = f"{input_tokens} in / {output_tokens} out"
    one = _output_rate(await load.closed(1, 1, input_tokens, output_tokens))
    many = _output_rate(await load.closed(16, 16, input_tokens, output_tokens))
    return {
        (case, "1 stream", "tok/s"): [one],
        (case, "16 streams", "tok/s"): [many],
        (case, "16 streams / 1 stream", "x"): [many / one],
    }


async def long_prompt(load: Load, scale: float) -> Figures:
    """8 running streams while a 4,000-token prompt is computed."""
    prompt_tokens = _scaled(4000, scale)
    case = f"8 streams, a {prompt_tokens}-token prompt arrives"
    result = await load.interfere(
        8, [prompt_tokens], stream_input=_scaled(64, scale), stream_output=_scaled(1000, scale), calm_tokens=16
    )
    _note_when_not_covered(case, result)
    longest_s, ttft_s = Distribution.of(result.disturbed_gaps_s).max, result.arrived[0].ttft_s
    return {
        (case, "time of the prompt", "s"): [ttft_s],
        (case, "longest gap of running streams", "s"): [longest_s],
        (case, "longest gap / time of the prompt", ""): [longest_s / ttft_s],
    }


CASES = {
    "throughput": throughput,
    "interference": interference,
    "scaling": scaling,
    "long_prompt": long_prompt,
}


async def run_cases(url: str, names: Sequence[str], scale: float) -> Figures:
    """Some cases, one after the other, against any server."""
    figures: Figures = {}
    async with Load(url) as load:
        await load.answer(16, 4)  # a first request warms everything up
        for name in names:
            figures |= await CASES[name](load, scale)
    return figures


def merged(runs: Sequence[Figures]) -> Figures:
    """All runs' figures of each metric."""
    return {
        key: [value for run in runs for value in run.get(key, [])] for key in dict.fromkeys(k for r in runs for k in r)
    }


def rows_of(engine: str, precision: str, figures: Figures, *, suffix: str = "", has_targets: bool = False) -> list[Row]:
    """One row per metric."""
    return [
        median_row(engine, precision, case + suffix, metric, unit, values, TARGETS.get(metric) if has_targets else None)
        for (case, metric, unit), values in figures.items()
    ]


def measure_layouts(
    model: str, layouts: Sequence[Layout], num_runs: int, scale: float, settings: dict[str, Any]
) -> list[Row]:
    """How the cores are shared: a 2,000-token prompt beside 8 streams, under each layout in turn."""
    runs: dict[Layout, list[Figures]] = {layout: [] for layout in layouts}
    with Services(model, layouts, settings) as services:
        for _ in range(num_runs):
            for layout in layouts:
                runs[layout].append(asyncio.run(_layout_case(services.under(layout).url, scale)))
    return [row for layout in layouts for row in rows_of("pdserve", "fp32", merged(runs[layout]), suffix=f", {layout}")]


async def _layout_case(url: str, scale: float) -> Figures:
    async with Load(url) as load:
        result = await load.interfere(
            8, [_scaled(2000, scale)], stream_input=16, stream_output=_scaled(1000, scale), calm_tokens=16
        )
    _note_when_not_covered("layouts", result)
    case = "8 streams, a prompt arrives"
    disturbed = Distribution.of(result.disturbed_gaps_s)
    return {
        (case, "ITL p50 before", "ms"): [Distribution.of(result.calm_gaps_s).p50 * 1e3],
        (case, "ITL p50 while computed", "ms"): [disturbed.p50 * 1e3],
        (case, "ITL p99 while computed", "ms"): [disturbed.p99 * 1e3],
        (case, "TTFT of the prompt", "s"): [result.arrived[0].ttft_s],
    }


def _note_when_not_covered(case: str, result: Interference) -> None:
    if not result.is_covered:
        print(
            f"(note on '{case}': streams ended before the arrived prompts were computed; their last gaps are missing)"
        )


def _output_rate(records: Sequence[RequestRecord]) -> float:
    return summarise(records, Slos()).output_tokens_per_s


def _scaled(tokens: int, scale: float) -> int:
    return max(4, round(tokens * scale))


def main(argv: list[str] | None = None) -> None:
    """Measure the cases or the layouts that were asked for, and print the figures."""
    options = _parse(argv)
    warn_when_busy()
    settings = dict(pair.split("=", 1) for pair in options.set)
    if options.layouts is not None:
        layouts = [Layout.parse(text) for text in options.layouts.split(",")]
        rows = measure_layouts(options.model, layouts, options.runs, options.scale, settings)
    else:
        names = options.cases.split(",")
        with Services(options.model, [UP], settings) as services:
            url = services.under(UP).url
            runs = [asyncio.run(run_cases(url, names, options.scale)) for _ in range(options.runs)]
        rows = rows_of("pdserve", options.precision, merged(runs), has_targets=True)
    publish(rows, _headline(rows), options.json)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    commands = parser("service", __doc__ or "")
    commands.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    commands.add_argument(
        "--layouts", nargs="?", const=DEFAULT_LAYOUTS, metavar="LIST", help=f"such as {DEFAULT_LAYOUTS}"
    )
    commands.add_argument("--runs", type=int, default=1, help="of everything (default: 1)")
    commands.add_argument("--model", default="demo")
    commands.add_argument("--precision", default="fp32", help="how rows are labelled, with --set DTYPE=…")
    commands.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all processes")
    commands.add_argument("--scale", type=float, default=1.0, help="of all numbers of tokens, for a quick try")
    return commands.parse_args(argv)


def _headline(rows: Sequence[Row]) -> str:
    wanted = ("output throughput", "ITL p99 while computed", "longest gap of running streams")
    found = {row.metric: row for row in rows if row.metric in wanted}
    return ", ".join(f"{row.metric} {row.value:.3g} {row.unit}" for row in found.values()) or f"{len(rows)} figures"


if __name__ == "__main__":
    main()
