"""Load patterns: when each request is sent. Fixed concurrency (closed loop), or arrivals at given times (open loop).

In an open loop requests are sent when they are due, however many are still running: a slow server does not
slow down its own load. Never looks at answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from pdserve.bench.prompts import Prompt
from pdserve.bench.record import RequestRecord

Send = Callable[[Prompt, float], Coroutine[Any, Any, RequestRecord]]
"""Sends one prompt that was due at a time of `time.perf_counter()`."""


def poisson_arrivals(rate_per_s: float, num_requests: int, seed: int) -> list[float]:
    """Ascending arrival times in seconds, with exponential gaps of mean 1/rate."""
    draw = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(num_requests):
        arrivals.append(at_s)
        at_s += draw.expovariate(rate_per_s)
    return arrivals


async def run_closed(send: Send, prompts: Sequence[Prompt], concurrency: int) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight until all prompts are answered."""
    waiting: Iterator[Prompt] = iter(prompts)
    records: list[RequestRecord] = []

    async def keep_sending() -> None:
        for prompt in waiting:
            records.append(await send(prompt, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(keep_sending())
    return records


async def run_open(send: Send, prompts: Sequence[Prompt], arrivals_s: Sequence[float]) -> list[RequestRecord]:
    """Send prompt i `arrivals_s[i]` seconds after the start, whatever the others do."""
    start_s = time.perf_counter()
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for prompt, arrival_s in zip(prompts, arrivals_s, strict=True):
            await asyncio.sleep(max(0.0, start_s + arrival_s - time.perf_counter()))
            tasks.append(group.create_task(send(prompt, start_s + arrival_s)))
    return [task.result() for task in tasks]
