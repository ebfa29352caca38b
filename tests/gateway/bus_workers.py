"""Scripted workers on the real bus: they speak the protocol, compute nothing, and misbehave when told to.

Token i of every answer is 100 + i, so that a test can name the right answer without knowing who gave it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from registrations import registration

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import Registry
from pdserve.errors import BusError
from pdserve.messages import (
    AnyMessage,
    AttemptKey,
    Cancel,
    DecodeJob,
    Failed,
    Finished,
    Message,
    PrefillJob,
    ResendTokens,
    Roster,
    RosterItem,
    SequenceTokens,
    Started,
    Timing,
    TokenBatch,
)
from pdserve.registration import Role, WorkerRegistration, WorkerState

HEARTBEAT_S = 0.1
STEP_S = 0.01


def token_at(index: int) -> int:
    return 100 + index


@dataclass(eq=False)
class Held:
    job: PrefillJob | DecodeJob
    next_index: int
    state: str


@dataclass(eq=False)
class BusWorker:
    """One worker on the bus. Set the knobs before or while it runs."""

    bus: Bus
    role: Role
    worker_id: str
    generation: str = "1"
    window: int = 100_000
    state: WorkerState = WorkerState.READY
    refusals: deque[str] = field(default_factory=deque)
    """Reasons with which the next jobs are refused."""
    fatal: str | None = None
    """Reason with which every job fails for good."""
    num_jobs_to_lose: int = 0
    num_tokens_before_hang: int | None = None
    """Stop producing (but keep breathing) at this output index."""
    is_silent: bool = False
    """Dead: no registration, no roster, no answer."""
    jobs: list[PrefillJob | DecodeJob] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    held: dict[AttemptKey, Held] = field(default_factory=dict)

    @property
    def registration(self) -> WorkerRegistration:
        return registration(
            self.worker_id,
            self.role,
            generation=self.generation,
            state=self.state,
            window=self.window,
            heartbeat_s=HEARTBEAT_S,
            block_size=16,
            num_blocks=1000,
            max_model_len=4000,
        )

    async def run(self) -> None:
        reader = StreamReader(self.bus, self.bus.keys.inbox(self.worker_id, self.generation), self._receive)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.run())
            tasks.create_task(self._breathe())
            tasks.create_task(self._work())

    # --- life

    async def _breathe(self) -> None:
        registry = Registry(self.bus)
        while True:
            if not self.is_silent:
                with suppress(BusError):
                    await registry.announce_worker(self.registration, 3 * HEARTBEAT_S)
                for gateway_id in {"gw", *(held.job.gateway_id for held in self.held.values())}:
                    self._say(self._roster(gateway_id), gateway_id)
            await asyncio.sleep(HEARTBEAT_S)

    def _roster(self, gateway_id: str) -> Roster:
        items = [
            RosterItem(**key._asdict(), state=held.state, next_index=held.next_index)
            for key, held in self.held.items()
            if held.job.gateway_id == gateway_id
        ]
        return Roster(worker_id=self.worker_id, generation=self.generation, items=items)

    def _receive(self, message: AnyMessage) -> None:
        if self.is_silent:
            return
        if isinstance(message, PrefillJob | DecodeJob):
            self.jobs.append(message)
            self._take(message)
        elif isinstance(message, Cancel):
            self.cancels.append(message)
            self.held.pop(message.key, None)
        elif isinstance(message, ResendTokens) and message.key in self.held:
            held = self.held[message.key]
            self._tokens(held, message.from_index, held.next_index)

    def _take(self, job: PrefillJob | DecodeJob) -> None:
        if self.num_jobs_to_lose > 0:
            self.num_jobs_to_lose -= 1
            return
        if self.refusals or self.fatal:
            reason = self.fatal or self.refusals.popleft()
            is_retryable = self.fatal is None
            self._say(Failed(**self._about(job), reason=reason, retryable=is_retryable), job.gateway_id)  # type: ignore[arg-type]
            return
        first_index = len(job.prompt_token_ids) - job.num_original_prompt_tokens
        held = self.held[job.key] = Held(job, first_index, "running")
        if isinstance(job, PrefillJob):
            started = Started(**self._about(job), num_cached_tokens=0, schedule_s=1e-4)  # type: ignore[arg-type]
            self._say(started, job.gateway_id)
            self._tokens(held, first_index, first_index + 1, Timing(schedule_s=1e-4, prefill_s=2e-4))
            held.state = "leased"

    def _about(self, job: PrefillJob | DecodeJob) -> dict[str, object]:
        return {**job.key._asdict(), "worker_id": self.worker_id, "generation": self.generation}

    def _say(self, message: Message, gateway_id: str) -> None:
        self.bus.send(self.bus.keys.tokens(gateway_id), message)

    def _tokens(self, held: Held, start: int, end: int, timing: Timing | None = None) -> None:
        job = held.job
        item = SequenceTokens(
            **job.key._asdict(), index=start, token_ids=[token_at(i) for i in range(start, end)], timing=timing
        )
        self._say(TokenBatch(worker_id=self.worker_id, generation=self.generation, items=[item]), job.gateway_id)
        held.next_index = max(held.next_index, end)
        if end >= job.sampling.max_tokens:
            finished = Finished(**self._about(job), finish_reason="length", num_output_tokens=end)  # type: ignore[arg-type]
            self._say(finished, job.gateway_id)
            self.held.pop(job.key, None)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.is_silent or self.role is Role.PREFILL:
                continue
            for held in list(self.held.values()):
                limit = self.num_tokens_before_hang
                if limit is None or held.next_index < limit:
                    is_first = isinstance(held.job, DecodeJob) and held.state == "running"
                    held.state = "decoding" if is_first else held.state
                    self._tokens(
                        held,
                        held.next_index,
                        held.next_index + 1,
                        Timing(transfer_s=0.003, transfer_bytes=64) if is_first else None,
                    )


@asynccontextmanager
async def running(*workers: BusWorker) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {timeout_s} s"
        await asyncio.sleep(0.005)
