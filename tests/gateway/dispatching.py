"""A dispatcher on a real bus for tests, what it tells a metrics library, and requests for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bus_workers import HEARTBEAT_S, BusWorker, token_at, until

from pdserve.bus.bus import Bus
from pdserve.bus.registry import RegistryView
from pdserve.gateway.dispatch.admission import AdmissionLimits
from pdserve.gateway.dispatch.dispatch_loop import DispatchLoop, WaitLimits
from pdserve.gateway.dispatch.dispatcher import Dispatcher
from pdserve.gateway.dispatch.exchange import is_inbox_full
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.generation.request import Event, Generation, GenerationRequest, Sender, TokensEvent
from pdserve.gateway.routing.placement import Placement
from pdserve.gateway.routing.router import Disaggregation, Router
from pdserve.registration import Role
from pdserve.sampling_params import SamplingParams

RETRY = RetryLimits(max_attempts=3, kv_lease_s=10.0, progress_timeout_s=20.0, roster_grace_s=2 * HEARTBEAT_S)
_numbers = itertools.count()


class Recorder:
    """What the dispatcher tells a metrics library."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.load: dict[str, int] = {}

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        self.told.append(("predicted", num_tokens))

    def shed(self, reason: str) -> None:
        self.told.append(("shed", reason))

    def cancelled(self, reason: str) -> None:
        self.told.append(("cancelled", reason))

    def redispatched(self, phase: str, reason: str) -> None:
        self.told.append(("redispatched", phase, reason))

    def dropped_tokens(self, num_tokens: int) -> None:
        self.told.append(("dropped", num_tokens))

    def diverged(self) -> None:
        self.told.append(("diverged",))

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        self.load = {
            "queued_requests": queued_requests,
            "queued_tokens": queued_tokens,
            "inflight": inflight,
            "held": held,
        }


class Service:
    """A gateway's dispatcher and the bus that workers use."""

    def __init__(
        self,
        url: str,
        recorder: Recorder,
        *,
        admission_limits: AdmissionLimits | None = None,
        wait_limits: WaitLimits | None = None,
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self.bus, self.workers_bus = Bus(url, "test", timeout_s=1.0), Bus(url, "test", timeout_s=1.0)
        self.view = RegistryView(self.bus, heartbeat_s=HEARTBEAT_S / 2)
        self.recorder = recorder
        placement = Placement(
            Router("f", disaggregation or Disaggregation()),
            settle_after_s=RETRY.roster_grace_s / 4,
            is_inbox_full=partial(is_inbox_full, self.bus),
        )
        self.dispatcher = Dispatcher(
            self.bus,
            self.view,
            DispatchLoop(placement, wait_limits or WaitLimits()),
            Sender("gw", "f"),
            observer=recorder,
            retry_limits=RETRY,
            admission_limits=admission_limits or AdmissionLimits(),
        )

    def worker(self, role: Role, worker_id: str, **knobs: object) -> BusWorker:
        return BusWorker(self.workers_bus, role, worker_id, **knobs)  # type: ignore[arg-type]

    def pair(self) -> tuple[BusWorker, BusWorker]:
        return self.worker(Role.PREFILL, "P"), self.worker(Role.DECODE, "D")

    async def until_known(self, *workers: BusWorker) -> None:
        await until(lambda: {worker.worker_id for worker in workers} <= set(self.view.workers))


@asynccontextmanager
async def service(url: str, **parts: Any) -> AsyncIterator[Service]:
    one = Service(url, Recorder(), **parts)
    await one.bus.start()
    await one.workers_bus.start()
    tasks = [asyncio.create_task(one.view.run()), asyncio.create_task(one.dispatcher.run())]
    try:
        yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await one.bus.close()
        await one.workers_bus.close()


def request(max_tokens: int = 8, n: int = 1, num_prompt: int = 40, **changes: object) -> GenerationRequest:
    now_s = time.monotonic()
    number = next(_numbers)
    values = {
        "request_id": f"r{number}",
        "prompt_token_ids": [number, *range(1, num_prompt)],
        "n": n,
        "sampling": SamplingParams(seed=1, max_tokens=max_tokens),
        "deadline_s": now_s + 20.0,
        "received_s": now_s,
    }
    return GenerationRequest(**{**values, **changes})  # type: ignore[arg-type]


async def next_events(generation: Generation) -> list[Event]:
    """Everything that is ready; waits for at least one event. Empty: the request is over."""
    while not (events := generation.take_events()) and not generation.is_done:
        generation.wake.clear()
        await generation.wake.wait()
    return events


async def collect(generation: Generation) -> list[Event]:
    events: list[Event] = []
    while ready := await next_events(generation):
        events.extend(ready)
    return events


def text_of(events: list[Event], choice: int = 0) -> list[int]:
    tokens: list[int] = []
    for event in events:
        if isinstance(event, TokensEvent) and event.choice == choice:
            assert event.index == len(tokens), "lost, doubled or reordered"
            tokens.extend(event.token_ids)
    return tokens


def answer(num_tokens: int) -> list[int]:
    return [token_at(index) for index in range(num_tokens)]
