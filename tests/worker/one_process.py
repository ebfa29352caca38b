"""Whole workers inside one process and in virtual time: real code, but for the model, the server and the wire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from virtual_time import VirtualTimeLoop, until
from wire import Wire, WireTransports

import pdserve.decode_worker.main
import pdserve.prefill_worker.main
from pdserve.bus.bus import Bus
from pdserve.bus.memory import MemoryServer
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import Registry
from pdserve.engine.engine import Engine
from pdserve.engine.executors.fake import FakeExecutor, FakeOptions, hash_token
from pdserve.engine.kv.block_tables import BlockTables
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.faults import Faults
from pdserve.messages import (
    AnyMessage,
    AttemptKey,
    Cancel,
    DecodeJob,
    Failed,
    Finished,
    Message,
    PrefillJob,
    Started,
    TokenBatch,
)
from pdserve.metrics.worker import WorkerMetrics
from pdserve.readiness import ReadyReason
from pdserve.registration import GatewayRegistration, Role, WorkerRegistration
from pdserve.sampling_params import SamplingParams
from pdserve.settings import DecodeSettings, PrefillSettings, load
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.host import WorkerHost
from pdserve.worker.identity import Identity
from pdserve.worker.own_registration import OwnRegistration, WorkerFacts
from pdserve.worker.parts import WorkerParts, make_worker
from pdserve.worker.watch import WorkerWatch

VOCAB_SIZE, EOS, BLOCK_SIZE, BUDGET = 97, frozenset({1}), 4, 16
HEARTBEAT_S, LEASE_S, HANDOFF_TIMEOUT_S, PREFILL_TIMEOUT_S = 1.0, 10.0, 15.0, 30.0
STEP_S = 0.01
GATEWAY_ID, FINGERPRINT = "gw", "fingerprint"


def tokens_of(prompt: list[int], num_tokens: int) -> list[int]:
    """What one engine alone generates after a prompt."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(hash_token(token_ids, VOCAB_SIZE, EOS))
    return token_ids[len(prompt) :]


def make_engine(clock: Any, *, num_blocks: int = 64, max_num_seqs: int = 8) -> Engine:
    """A small engine without a model; a step computes at most `BUDGET` tokens."""
    executor = FakeExecutor(
        FakeOptions(), vocab_size=VOCAB_SIZE, eos_token_ids=EOS, block_size=BLOCK_SIZE, max_model_len=512
    )
    tables = BlockTables(num_blocks, BLOCK_SIZE, is_cache_on=True, cache_key=b"test")
    scheduler = Scheduler(
        tables, max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET, max_wait_s=10.0, watermark_blocks=1
    )
    return Engine(executor, scheduler, eos_token_ids=EOS, clock=clock)


class Worker:
    """One worker process; `is_resting` keeps its engine from stepping, though commands still run."""

    def __init__(self, world: World, role: Role, worker_id: str, *, num_blocks: int = 64, **settings: Any) -> None:
        kind = PrefillSettings if role is Role.PREFILL else DecodeSettings
        defaults = {
            "HEARTBEAT_S": HEARTBEAT_S, "KV_LEASE_S": LEASE_S, "HANDOFF_TIMEOUT_S": HANDOFF_TIMEOUT_S,
            "PREFILL_TIMEOUT_S": PREFILL_TIMEOUT_S, "MAX_NUM_BATCHED_TOKENS": BUDGET, "MAX_NUM_SEQS": 8,
        }  # fmt: skip
        self.settings = load(kind, [], {}, defaults | settings)
        self.faults = Faults()
        self.is_resting = False
        self.identity = Identity(worker_id)
        self.bus = Bus(world.server, "test", timeout_s=0.5, faults=self.faults, clock=world.loop.time)
        self.engine = make_engine(world.loop.time, num_blocks=num_blocks)
        self.engine_thread = EngineThread(self.engine, clock=world.loop.time)
        self.transports = WireTransports(world.wire, self.engine.kv_cache)
        self.metrics = CollectorRegistry()
        self.parts = WorkerParts.on(self.bus, self.identity, self.transports, heartbeat_s=HEARTBEAT_S)
        self.worker = make_worker(
            self.parts,
            self.engine_thread,
            WorkerWatch(WorkerMetrics(self.metrics), self.engine),
            self._make_part,
            fingerprint=FINGERPRINT,
            heartbeat_s=HEARTBEAT_S,
            prefill_timeout_s=self.settings.prefill_timeout_s,
        )
        self.host = self._make_host(world)
        self.stop = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def _make_part(self, worker: Any, parts: WorkerParts) -> Any:
        if isinstance(self.settings, PrefillSettings):
            return pdserve.prefill_worker.main.make_part(worker, parts, self.settings)
        return pdserve.decode_worker.main.make_part(worker, parts, self.settings)

    def _make_host(self, world: World) -> WorkerHost:
        facts = WorkerFacts(
            model="tiny", fingerprint=FINGERPRINT, kv_signature=self.transports.kv_signature, block_size=BLOCK_SIZE,
            num_blocks=self.engine.block_pool.num_blocks, max_model_len=512, url="http://h:1", node="n", zone="",
            heartbeat_s=HEARTBEAT_S, ttl_s=3 * HEARTBEAT_S,
        )  # fmt: skip
        return WorkerHost(
            self.worker,
            self.identity,
            OwnRegistration(facts, self.identity, self.bus, self.transports.announced),
            self.parts.inbox,
            self.transports,
            bus=self.bus,
            view=self.parts.view,
            clock=world.loop.time,
        )

    async def start(self) -> None:
        await self.bus.start()
        self.transports.open(self.identity.ref)
        self.engine_thread.attach(asyncio.get_running_loop(), self.worker)
        work = (self._turn_forever(), self.parts.view.run(), self.host.run(self.stop), self.host.notice_standstill())
        self.tasks = [asyncio.create_task(each) for each in work]
        await until(lambda: self.host.ready_reason is ReadyReason.READY)

    async def _turn_forever(self) -> None:
        while True:
            self.engine_thread.turn(has_step=not self.is_resting)
            await asyncio.sleep(STEP_S)

    async def die(self) -> None:
        """Be gone at once, as a killed process: it says nothing more, and nothing reads from it."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.parts.inbox.close()
        self.host._tasks.cancel()
        if self.identity.ref in self.transports._wire.sides:
            await self.transports.close()
        await self.bus.close()

    @property
    def blocks(self) -> dict[str, int]:
        """How many blocks are in each state but free and cached, after a check of the whole ledger."""
        states = self.engine.check_integrity().by_state
        return {state: count for state, count in states.items() if count and state not in ("free", "cached")}

    def counted(self, name: str, **labels: str) -> float:
        """The value of a metric."""
        return self.metrics.get_sample_value(name, labels) or 0.0

    async def registration(self) -> WorkerRegistration | None:
        return await self.parts.registry.worker(self.identity.worker_id)


@dataclass
class Sequence:
    """One attempt, as its gateway sees it."""

    gateway: Gateway
    key: AttemptKey
    prompt: list[int]
    max_tokens: int

    def _job(self) -> dict[str, Any]:
        return self.key._asdict() | {
            "gateway_id": GATEWAY_ID,
            "fingerprint": FINGERPRINT,
            "prompt_token_ids": self.prompt,
            "num_original_prompt_tokens": len(self.prompt),
            "sampling": SamplingParams(seed=0, temperature=0.0, max_tokens=self.max_tokens),
            "remaining_s": 600.0,
        }

    def prefill(self, worker: Worker, **changes: Any) -> None:
        self.gateway.send(worker, PrefillJob(**self._job() | changes))

    def decode(self, worker: Worker, prefill: Worker | None = None, **changes: Any) -> None:
        fields = self._job()
        if prefill is not None:
            ref = prefill.identity.ref
            fields |= {"prefill_worker_id": ref.worker_id, "prefill_generation": ref.generation}
        self.gateway.send(worker, DecodeJob(**fields | changes))

    def cancel(self, *workers: Worker) -> None:
        for worker in workers:
            self.gateway.send(worker, Cancel(**self.key._asdict()))

    def heard(self, kind: type[Message], worker: Worker | None = None) -> list[Any]:
        """Messages of one kind about this attempt (from one worker)."""
        return [
            message
            for message in self.gateway.messages
            if isinstance(message, kind) and getattr(message, "key", None) == self.key
            and (worker is None or message.worker == worker.identity.ref)
        ]  # fmt: skip

    @property
    def has_started(self) -> bool:
        return bool(self.heard(Started))

    @property
    def failures(self) -> list[Failed]:
        return self.heard(Failed)

    @property
    def is_finished(self) -> bool:
        return bool(self.heard(Finished))

    @property
    def token_ids(self) -> list[int]:
        """All tokens, in order and without gaps; two workers that disagree fail the test."""
        by_index: dict[int, int] = {}
        for message in self.gateway.messages:
            for item in message.items if isinstance(message, TokenBatch) else ():
                for index, token_id in enumerate(item.token_ids, item.index):
                    if item.key == self.key:
                        assert by_index.setdefault(index, token_id) == token_id, f"two tokens at {index}"
        assert sorted(by_index) == list(range(len(by_index))), f"a gap in {sorted(by_index)}"
        return [by_index[index] for index in range(len(by_index))]


class Gateway:
    """Sends jobs, hears everything, decides nothing."""

    def __init__(self, world: World) -> None:
        self.bus = Bus(world.server, "test", timeout_s=0.5, clock=world.loop.time)
        self.messages: list[AnyMessage] = []
        self._reader = StreamReader(self.bus, self.bus.keys.tokens(GATEWAY_ID), self.messages.append)
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.start()
        self._task = asyncio.create_task(self._reader.run())
        registration = GatewayRegistration(
            gateway_id=GATEWAY_ID, generation="g", pid=1, url="http://h:2", metrics_url="http://h:3"
        )
        await Registry(self.bus).announce_gateway(registration, 3600.0)

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.bus.close()

    def send(self, worker: Worker, message: Message) -> None:
        self.bus.send(self.bus.keys.inbox(*worker.identity.ref), message)

    def sequence(self, num_prompt_tokens: int = 40, max_tokens: int = 6) -> Sequence:
        """A new attempt of a new request; no two prompts begin alike."""
        number = next(self._numbers)
        prompt = [(7 * index * number + 3 * number + 2) % (VOCAB_SIZE - 2) + 2 for index in range(num_prompt_tokens)]
        return Sequence(self, AttemptKey(f"r{number}", 0, 1, f"nonce-{number}"), prompt, max_tokens)


class World:
    """A server, a wire, a gateway and workers."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.loop = loop
        self.server = MemoryServer(loop.time)
        self.wire = Wire()
        self.gateway = Gateway(self)
        self.workers: list[Worker] = []

    async def worker(self, role: Role, worker_id: str, **options: Any) -> Worker:
        worker = Worker(self, role, worker_id, **options)
        self.workers.append(worker)
        await worker.start()
        return worker

    async def pair(self, **options: Any) -> tuple[Worker, Worker]:
        """A prefill and a decode worker, which gets the options."""
        return await self.worker(Role.PREFILL, "p"), await self.worker(Role.DECODE, "d", **options)

    async def until_nothing_is_held(self, *workers: Worker) -> None:
        """Wait until no attempt and no block is held; a block that is lost fails the test."""
        held = workers or tuple(self.workers)
        await until(lambda: all(not worker.worker.num_held and not worker.blocks for worker in held))


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    """A world that ends with an empty ledger at every worker that still lives."""
    made = World()
    await made.gateway.start()
    yield made
    living = [worker for worker in made.workers if not all(task.done() for task in worker.tasks)]
    if living:
        await made.until_nothing_is_held(*living)
    for worker in living:
        await worker.die()
    await made.gateway.stop()
