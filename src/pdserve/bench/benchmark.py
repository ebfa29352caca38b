"""Runs a benchmark: ask the server, make prompts, warm up, run the load several times, summarise.

Step before: options.py; step after: report.py. All prompts exist before the first request of a run is sent.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pdserve.bench.client import Target, send
from pdserve.bench.connection import ConnectionPool
from pdserve.bench.load import poisson_arrivals, run_closed, run_open
from pdserve.bench.options import BenchOptions
from pdserve.bench.progress import Progress
from pdserve.bench.prompts import Prompt, TextPrompts, TokenPrompts
from pdserve.bench.record import RequestRecord
from pdserve.bench.server import Server, ServerError
from pdserve.bench.summary import RunSummary, median_of, summarise
from pdserve.bench.traces import Trace


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one measured run, and its numbers."""

    records: tuple[RequestRecord, ...]
    summary: RunSummary


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All runs of a benchmark, and what was asked of which server."""

    url: str
    model: str
    started_at: float
    """Seconds since the epoch."""
    server: dict[str, Any]
    trace: Trace | None
    runs: tuple[Run, ...]
    median: RunSummary


async def run_benchmark(
    options: BenchOptions, url: str, api_key: str | None, report: Callable[[str], None], progress: Progress
) -> BenchResult:
    """Prepare, warm up and measure; what the user should know meanwhile goes to `report` and `progress`.

    Raises:
        ServerError: unreachable, no models, or not even a first request succeeds.
        TraceError: the trace cannot be read.
    """
    trace = options.read_trace()
    if trace is not None:
        report(_about(trace))
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    server, pool, started_at = Server(url, headers), ConnectionPool(url, headers), time.time()
    try:
        models = await server.models()
        names = [str(entry.get("id")) for entry in models]
        if options.model is not None and options.model not in names:
            raise ServerError(f"the server at {url} serves {', '.join(names)}, not {options.model!r}")
        model = options.model or names[0]
        facts = await server.describe() | {"model": next((m for m in models if m.get("id") == model), None)}
        bench = _Bench(options, server, pool, model, trace, progress)
        await bench.prepare(report)
        await bench.warm_up(report)
        runs = [await bench.run(number) for number in range(options.num_runs)]
    finally:
        progress.finish()
        await pool.close()
        await server.close()
    return BenchResult(url, model, started_at, facts, trace, tuple(runs), median_of([run.summary for run in runs]))


class _Bench:
    """One benchmark in progress."""

    def __init__(
        self,
        options: BenchOptions,
        server: Server,
        pool: ConnectionPool,
        model: str,
        trace: Trace | None,
        progress: Progress,
    ) -> None:
        self._options, self._server, self._pool, self._progress = options, server, pool, progress
        self._lengths = random.Random(options.seed)
        self._requests = trace.requests[: options.max_requests] if trace else None
        self._token_prompts: TokenPrompts | None = None
        self._text_prompts = TextPrompts(lambda text: server.count_chat_tokens(model, text), options.seed)
        self._target = Target(
            model=model,
            endpoint=options.endpoint,
            timeout_s=options.timeout_s,
            does_ignore_eos=options.does_ignore_eos,
            does_ask_token_ids=options.does_ask_token_ids,
            temperature=options.temperature,
            extra_body=options.extra_body,
        )

    async def prepare(self, report: Callable[[str], None]) -> None:
        """Find out which prompts can be made: token ids where the server tokenizes, else text."""
        if self._options.endpoint == "chat":
            return
        token_ids = await self._server.ordinary_token_ids(self._target.model)
        if len(token_ids) >= 2:
            self._token_prompts = TokenPrompts(token_ids, self._options.seed)
        else:
            report("the server has no /tokenize: prompts are text, their length is an estimate")

    async def warm_up(self, report: Callable[[str], None]) -> None:
        """One request to see that the server can be measured at all, then as many as asked for."""
        first = await send(self._pool, self._target, await self._prompt(*self._next_lengths()))
        if not first.is_ok and "return_token_ids" in (first.error or ""):
            report("the server refuses return_token_ids: ITL is measured per event")
            self._target = replace(self._target, does_ask_token_ids=False)
            first = await send(self._pool, self._target, await self._prompt(*self._next_lengths()))
        if not first.is_ok:
            raise ServerError(f"the first request to {self._server.url} failed: {first.error}")
        prompts = [await self._prompt(*self._next_lengths()) for _ in range(self._options.num_warmup)]
        self._progress.start("warm-up", len(prompts))
        await run_closed(self._send, prompts, self._options.concurrency or 4)

    async def run(self, number: int) -> Run:
        """Send one run's prompts by the load pattern and sum up; `number` counts from 0."""
        prompts, arrivals_s = await self._plan(number)
        await self._pool.open_idle(self._options.concurrency or 8)
        with _old_objects_left_alone():
            self._progress.start(f"run {number + 1}/{self._options.num_runs}", len(prompts))
            if arrivals_s is None:
                records = await run_closed(self._send, prompts, self._options.concurrency or 1)
            else:
                records = await run_open(self._send, prompts, arrivals_s)
        return Run(tuple(records), summarise(records, self._options.slos))

    async def _plan(self, number: int) -> tuple[list[Prompt], list[float] | None]:
        """Prompts of one run, and when each is sent; without arrivals the loop is closed."""
        options = self._options
        if self._requests is not None:
            sizes = [self._cut(request.num_input_tokens, request.num_output_tokens) for request in self._requests]
            arrivals_s = [request.at_s / options.speed for request in self._requests]
            return [await self._prompt(*size) for size in sizes], arrivals_s
        prompts = [await self._prompt(*self._next_lengths()) for _ in range(options.num_requests)]
        if options.rate_per_s is None:
            return prompts, None
        return prompts, poisson_arrivals(options.rate_per_s, len(prompts), options.seed + number)

    async def _send(self, prompt: Prompt, due_s: float) -> RequestRecord:
        self._progress.on_sent()
        record = await send(self._pool, self._target, prompt, due_s)
        self._progress.on_done(record.num_output_tokens, record.is_ok)
        return record

    async def _prompt(self, num_input_tokens: int, num_output_tokens: int) -> Prompt:
        if self._token_prompts is not None:
            return self._token_prompts.make(num_input_tokens, num_output_tokens)
        return await self._text_prompts.make(num_input_tokens, num_output_tokens)

    def _next_lengths(self) -> tuple[int, int]:
        if self._requests is not None:
            request = self._lengths.choice(self._requests)
            return self._cut(request.num_input_tokens, request.num_output_tokens)
        return self._options.input_tokens.draw(self._lengths), self._options.output_tokens.draw(self._lengths)

    def _cut(self, num_input_tokens: int, num_output_tokens: int) -> tuple[int, int]:
        max_input, max_output = self._options.max_input_tokens, self._options.max_output_tokens
        return max(1, min(num_input_tokens, max_input or num_input_tokens)), max(
            1, min(num_output_tokens, max_output or num_output_tokens)
        )


def _about(trace: Trace) -> str:
    spread = f", quantised to {trace.bin_s:g} s and spread inside" if trace.bin_s else ""
    return (
        f"trace: {len(trace.requests)} requests over {trace.requests[-1].at_s:.0f} s; columns "
        f"{', '.join(trace.columns)}; arrivals in {trace.unit}{spread}"
    )


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Without this a full garbage collection in the middle of a run would be measured as a gap of every stream."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
