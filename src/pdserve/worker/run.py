"""Runs one worker process from its settings to its exit: what `pdserve prefill` and `pdserve decode` share.

    load → transports → HTTP port → bus → register → serve → (SIGTERM) drain → close

The HTTP port opens once the model is loaded; /ready says yes only when registered and able to transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time

from msgspec import structs
from prometheus_client import CollectorRegistry

from pdserve.bus.bus import Bus
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import LedgerReport
from pdserve.errors import PdserveError
from pdserve.faults import Faults
from pdserve.http_server import HttpServer, url_of
from pdserve.ids import WorkerId
from pdserve.log import get_logger, setup_logging
from pdserve.metrics.process import ProcessMetrics, render
from pdserve.metrics.worker import WorkerMetrics
from pdserve.process import listen_or_explain, read_faults, run_with_background, say_stage, stop_on_signals
from pdserve.readiness import Readiness, ReadyLoad
from pdserve.reasons import FailReason
from pdserve.registration import Role
from pdserve.settings import WorkerSettings
from pdserve.transfer.choose import usable_transports
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.host import WorkerHost
from pdserve.worker.http import WorkerProbes, worker_app
from pdserve.worker.identity import Identity
from pdserve.worker.load import LoadedModel, load_model
from pdserve.worker.own_registration import OwnRegistration, WorkerFacts
from pdserve.worker.pages_ahead import PagesAhead
from pdserve.worker.parts import MakePart, WorkerParts, make_worker
from pdserve.worker.ready import worker_readiness
from pdserve.worker.role_worker import RoleWorker
from pdserve.worker.stages import StartStages, process_age_s
from pdserve.worker.transports import TransportOptions, WorkerTransports
from pdserve.worker.watch import WorkerWatch

logger = get_logger(__name__)

_STOP_ENGINE_S = 5.0
_STOP_PAGES_S = 1.0


def run_worker(settings: WorkerSettings, role: Role, make_part: MakePart) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status."""
    stages = StartStages(process_age_s())
    identity = Identity(WorkerId(settings.worker_id or f"{role.value}-{secrets.token_hex(4)}"))
    setup_logging(settings.log_level, settings.log_format, process=f"{role.value} {identity.worker_id}")
    faults = read_faults(os.environ)
    model = load_model(settings, stages)
    asyncio.run(_Worker(settings, role, identity, model, faults, stages).run(make_part))
    return 0


class _Worker:
    """One process: builds the parts in order and takes them down in reverse."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: Role,
        identity: Identity,
        model: LoadedModel,
        faults: Faults | None,
        stages: StartStages,
    ) -> None:
        self._settings = settings
        self._role = role
        self._identity = identity
        self._model = model
        self._faults = faults
        self._stages = stages
        self._collectors = CollectorRegistry()

    async def run(self, make_part: MakePart) -> None:
        settings, identity = self._settings, self._identity
        stop = asyncio.Event()
        stop_on_signals(stop)
        bus = Bus(settings.redis_url, settings.service, timeout_s=settings.bus_timeout_s, faults=self._faults)
        await bus.start()
        self._stages.done("bus")
        ProcessMetrics(self._collectors, bus)
        engine_thread = EngineThread(self._model.engine, before_step=self._before_step)
        watch = WorkerWatch(WorkerMetrics(self._collectors), self._model.engine)
        watch.loaded(self._model.load_s)
        parts = self._make_parts(bus)
        parts.transports.open(identity.ref)
        self._stages.done("transport")
        worker = make_worker(
            parts,
            engine_thread,
            watch,
            make_part,
            fingerprint=self._model.card.fingerprint,
            heartbeat_s=settings.heartbeat_s,
            prefill_timeout_s=settings.prefill_timeout_s,
        )
        pages = self._keep_pages_ahead()
        engine_thread.start(asyncio.get_running_loop(), worker)
        own_socket = listen_or_explain("METRICS_PORT", settings.host, settings.metrics_port)
        url = url_of(own_socket, settings.advertise_host)
        self._host = host = self._make_host(parts, worker, url)
        server = HttpServer(worker_app(self._probes(worker, parts)), own_socket)
        background = {
            "the HTTP port": server.run(),
            "the engine's thread": engine_thread.wait_for_end(),
            "the bus connection": bus.wait_for_end(settings.bus_start_timeout_s),
            "the inbox": parts.inbox.wait_for_end(),
            "the registry view": parts.view.run(),
            "the watch for standstills": host.notice_standstill(),
        }
        self._stages.done("HTTP")
        say_stage(f"serving {self._role.value} at {url} after {self._stages}")
        try:
            await run_with_background(self._serve(host, stop), background)
        except PdserveError:
            with contextlib.suppress(Exception):  # the reason is known, and gateways shall not wait for a timeout
                await host.drain(0.0, FailReason.RESTARTING)
            raise
        finally:
            await parts.transports.close()
            engine_thread.stop(_STOP_ENGINE_S)
            pages.stop(_STOP_PAGES_S)
            await bus.close()

    async def _serve(self, host: WorkerHost, stop: asyncio.Event) -> None:
        await host.run(stop)
        await host.drain(self._settings.drain_s)

    def _keep_pages_ahead(self) -> PagesAhead:
        engine = self._model.engine
        pool, block_bytes = engine.block_pool, engine.executor.kv_spec.block_bytes
        pages = PagesAhead(engine.kv_cache)
        pool.on_first_use = lambda num_ever_used: pages.reach(num_ever_used * block_bytes)
        pages.start(pool.num_ever_used * block_bytes)
        return pages

    def _make_parts(self, bus: Bus) -> WorkerParts:
        transports = WorkerTransports(self._model.engine.kv_cache, self._transport_options())
        return WorkerParts.on(
            bus,
            self._identity,
            transports,
            heartbeat_s=self._settings.heartbeat_s,
            publish_delay_s=self._publish_delay_s,
        )

    def _transport_options(self) -> TransportOptions:
        settings = self._settings
        host = settings.host if settings.transfer_host is None else settings.transfer_host
        return TransportOptions(
            setting=settings.transport,
            kv_signature=self._model.kv_signature,
            quarantine_s=settings.quarantine_s,
            read_timeout_s=settings.handoff_timeout_s,
            make=lambda: usable_transports(
                settings.transport,
                host=host,
                port=settings.transfer_port,
                advertise_host=settings.advertise_host or "",
                progress_thread=self._model.engine.kv_cache.is_cuda,
            ),
            verifies=settings.integrity == "full",
            num_threads=1 if self._role is Role.PREFILL else 2,
            faults=self._faults,
        )

    def _make_host(self, parts: WorkerParts, worker: RoleWorker, url: str) -> WorkerHost:
        settings, model = self._settings, self._model
        facts = WorkerFacts(
            model=model.card.served_name,
            fingerprint=model.card.fingerprint,
            kv_signature=model.kv_signature,
            block_size=model.engine.block_size,
            num_blocks=model.engine.block_pool.num_blocks,
            max_model_len=model.engine.executor.max_model_len,
            url=url,
            node=settings.node or socket.gethostname(),
            zone=settings.zone,
            heartbeat_s=settings.renewal_s,
            ttl_s=settings.registration_ttl_s,
        )
        registration = OwnRegistration(facts, self._identity, parts.bus, parts.transports.announced)
        return WorkerHost(
            worker,
            self._identity,
            registration,
            parts.inbox,
            parts.transports,
            bus=parts.bus,
            view=parts.view,
            clock=parts.bus.clock,
        )

    def _probes(self, worker: RoleWorker, parts: WorkerParts) -> WorkerProbes:
        thread = worker.engine_thread

        def step_problem() -> str | None:
            age_s = thread.step_age_s
            return f"a step has been running for {age_s:.0f} s" if age_s > self._settings.step_timeout_s else None

        def readiness() -> Readiness:
            pool, scheduler = self._model.engine.block_pool, self._model.engine.scheduler
            told = worker_readiness(
                self._host.ready_reason,
                step_problem=step_problem(),
                transport_problem=parts.transports.problem,
                load=ReadyLoad(
                    num_running=len(scheduler.running),
                    num_waiting=len(scheduler.waiting),
                    num_used_blocks=pool.num_blocks - pool.num_available,
                ),
            )
            worker_id, generation = self._identity.ref
            return structs.replace(told, id=worker_id, generation=generation, pid=os.getpid())

        async def ledger() -> LedgerReport:
            return await thread.call(Engine.check_integrity)

        async def metrics() -> bytes:
            with contextlib.suppress(TimeoutError):  # a step may hang: then the gauges are old
                report = await asyncio.wait_for(thread.call(lambda engine: engine.block_pool.report()), 1.0)
                worker.watch.refresh(report, num_pulls=parts.transports.num_pulls, is_draining=worker.is_draining)
            return render(self._collectors)[0]

        return WorkerProbes(
            health=step_problem,
            readiness=readiness,
            metrics=metrics,
            ledger=ledger,
            attempts=worker.attempts.active,
            clock=time.monotonic,
            faults=self._faults,
        )

    def _publish_delay_s(self) -> float:
        """Test hook, asked for each message to a gateway."""
        return self._faults.delay_s("publish") if self._faults is not None else 0.0

    def _before_step(self) -> None:
        """Test hook, in the engine's thread."""
        if self._faults is not None:
            delay_s = self._faults.delay_s("prefill" if self._role is Role.PREFILL else "step")
            if delay_s:
                time.sleep(delay_s)
