"""One gateway process from its parts to its exit.

    bus → dispatcher → HTTP ports → register → serve → (SIGTERM) drain → withdraw → close

Draining: the ports stay open and answer new requests with 503 while streams end, the registration stays so that
workers go on, and what is left after DRAIN_S ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec import structs
from prometheus_client import CollectorRegistry

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry, RegistryView
from pdserve.errors import BusError
from pdserve.faults import Faults
from pdserve.gateway.app import create_app, create_system_app
from pdserve.gateway.counting import GatewayCounting
from pdserve.gateway.dispatch.from_settings import dispatcher_from
from pdserve.gateway.generation.request import Sender
from pdserve.gateway.http.system_routes import SystemView
from pdserve.gateway.openai.frontend import Frontend, FrontendLimits
from pdserve.gateway.text.chat_prompt import ChatPrompts
from pdserve.http_protocol import ConnectionLimits
from pdserve.http_server import HttpServer, url_of
from pdserve.ids import GatewayId, GenerationId
from pdserve.log import get_logger
from pdserve.metrics import GatewayMetrics, ProcessMetrics, render
from pdserve.models.card import ModelCard
from pdserve.process import listen_or_explain, run_with_background, say_stage, stop_on_signals
from pdserve.readiness import Readiness
from pdserve.registration import GatewayRegistration, WorkerState
from pdserve.settings import GatewaySettings

_log = get_logger(__name__)

_LAST_WRITES_S = 2.0
"""After the last request has ended: for its bytes to leave."""


class GatewayProcess:
    """Builds the parts in order and takes them down in reverse."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: GatewayId,
        card: ModelCard,
        prompts: ChatPrompts,
        faults: Faults | None,
    ) -> None:
        self._settings, self._gateway_id, self._faults = settings, gateway_id, faults
        self._generation = GenerationId(secrets.token_hex(4))
        self._collectors = CollectorRegistry()
        self._bus = Bus(settings.redis_url, settings.service, timeout_s=settings.bus_timeout_s, faults=faults)
        self._registry = Registry(self._bus)
        self._view = RegistryView(self._bus, settings.heartbeat_s)
        ProcessMetrics(self._collectors, self._bus)
        counting = GatewayCounting(_metrics(self._collectors, settings, card))
        sender = Sender(gateway_id, card.fingerprint)
        self._dispatcher = dispatcher_from(settings, self._bus, self._view, sender, counting)
        # Encoding releases the interpreter lock; a few more threads than cores let short prompts pass long ones.
        self._executor = ThreadPoolExecutor(2 + (os.cpu_count() or 2), thread_name_prefix="text")
        self._frontend = Frontend(
            card,
            prompts,
            self._dispatcher,
            self._executor,
            draw_seed=_seeds(settings.seed),
            limits=_limits(settings),
            observer=counting,
            has_pins=faults is not None,
        )
        self._announce_now = asyncio.Event()
        self._bus.on_new_server(self._announce_now.set)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        stop_on_signals(stop)
        api_socket, system_socket = self._listen()
        await self._bus.start()
        background = {
            "the bus connection": self._bus.wait_for_end(self._settings.bus_start_timeout_s),
            "the registry view": self._view.run(),
            "the dispatcher": self._dispatcher.run(),
            "the registration": self._announce_forever(api_socket, system_socket),
            **{name: server.run() for name, server in self._servers(api_socket, system_socket).items()},
        }
        try:
            await run_with_background(self._serve(stop), background)
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(BusError):
                await self._registry.withdraw_gateway(self._gateway_id)
            await self._bus.close()

    def _listen(self) -> tuple[socket.socket, socket.socket | None]:
        """The API's socket, and that of METRICS_PORT; with one of its own, the API's port may be shared."""
        settings = self._settings
        has_own_port = settings.metrics_port != 0
        api = listen_or_explain("PORT", settings.host, settings.port, is_shared=has_own_port)
        if not has_own_port:
            return api, None
        return api, listen_or_explain("METRICS_PORT", settings.host, settings.metrics_port)

    def _servers(self, api_socket: socket.socket, system_socket: socket.socket | None) -> dict[str, HttpServer]:
        settings = self._settings
        self._api_url = url_of(api_socket, settings.advertise_host)
        app = create_app(self._frontend, self._system_view(is_shared=system_socket is not None))
        limits = ConnectionLimits(
            stream_buffer_bytes=settings.stream_buffer_bytes,
            stall_timeout_s=settings.client_stall_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
        )
        servers = {"the API's port": HttpServer(app, api_socket, limits)}
        if system_socket is not None:
            system_app = create_system_app(self._system_view(is_shared=False))
            servers["the metrics port"] = HttpServer(system_app, system_socket, limits)
        say_stage(f"serving at {self._api_url}")
        return servers

    def _system_view(self, *, is_shared: bool) -> SystemView:
        return SystemView(
            readiness=self._readiness,
            render_metrics=lambda: render(self._collectors),
            faults=self._faults,
            other_metrics_urls=self._metrics_urls if is_shared else list,
        )

    def _readiness(self) -> Readiness:
        own, generation = self._gateway_id, self._generation
        return structs.replace(self._dispatcher.readiness, id=own, generation=generation, pid=os.getpid())

    def _metrics_urls(self) -> list[str]:
        """The metrics of all gateways behind our port, when there are several."""
        behind = [g.metrics_url for g in self._view.gateways.values() if g.url == self._api_url]
        return sorted(behind) if len(behind) > 1 else []

    async def _announce_forever(self, api_socket: socket.socket, system_socket: socket.socket | None) -> None:
        settings = self._settings
        metrics_url = f"{url_of(system_socket or api_socket, settings.advertise_host)}/metrics"
        while True:
            self._announce_now.clear()
            registration = GatewayRegistration(
                gateway_id=self._gateway_id,
                generation=self._generation,
                pid=os.getpid(),
                url=self._api_url,
                metrics_url=metrics_url,
                state=WorkerState.DRAINING if self._frontend.is_draining else WorkerState.READY,
            )
            try:
                await self._registry.announce_gateway(registration, settings.registration_ttl_s)
            except BusError as error:
                _log.debug("cannot register: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.heartbeat_s):
                    await self._announce_now.wait()

    async def _serve(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._frontend.is_draining = True
        self._announce_now.set()
        _log.info("draining: %d requests in hand", self._frontend.num_active)
        await self._dispatcher.drain(self._settings.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES_S):
                await self._frontend.wait_until_idle()


def _metrics(collectors: CollectorRegistry, settings: GatewaySettings, card: ModelCard) -> GatewayMetrics:
    return GatewayMetrics(
        collectors,
        model=card.served_name,
        ttft_slo_s=settings.ttft_slo_s,
        tpot_slo_s=settings.tpot_slo_s,
        handoff_slo_s=settings.handoff_slo_s,
    )


def _limits(settings: GatewaySettings) -> FrontendLimits:
    return FrontendLimits(
        max_body_bytes=settings.max_body_bytes,
        request_deadline_s=settings.request_deadline_s,
        sse_keepalive_s=settings.sse_keepalive_s,
        client_stall_timeout_s=settings.client_stall_timeout_s,
    )


def _seeds(seed: int | None) -> Callable[[], int]:
    """Draws a seed for each request that brings none."""
    generator = random.SystemRandom() if seed is None else random.Random(seed)
    return lambda: generator.getrandbits(63)
