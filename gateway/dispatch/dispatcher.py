"""The dispatcher: owner of every request between the HTTP layer and the workers. Step 3 of 8 of a request's way.

Before: generation/request.py, a `GenerationRequest`. After: exchange.py, which sends it to workers and feeds its
`Generation`. This file is the side that the HTTP layer sees: it lets a request in or refuses it, says whether the
gateway is ready and how much fits, keeps time, and drains. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from pdserve.bus.bus import Bus
from pdserve.bus.registry import RegistryView
from pdserve.gateway.dispatch import admission
from pdserve.gateway.dispatch.admission import AdmissionLimits, ServiceView
from pdserve.gateway.dispatch.dispatch_loop import DispatchLoop
from pdserve.gateway.dispatch.exchange import Exchange
from pdserve.gateway.dispatch.live import LiveSequence
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import Generation, GenerationRequest, Sender
from pdserve.gateway.observers import DispatchObserver
from pdserve.gateway.routing.router import Demand
from pdserve.log import get_logger
from pdserve.readiness import Readiness, ReadyLoad, ReadyReason
from pdserve.reasons import CancelReason
from pdserve.registration import WorkerRegistration

_log = get_logger(__name__)

TICK_S = 0.1
"""Timers are this late at most; nothing that a client sees on a good day waits for a tick."""

_NOT_READY = {
    ReadyReason.DRAINING: "This gateway is shutting down; send requests to another one.",
    ReadyReason.BUS_UNREACHABLE: "The bus does not answer; check REDIS_URL and the server behind it.",
    ReadyReason.NO_WORKERS: "The workers that a request needs are not ready; start them, or look at their /ready.",
}


class Dispatcher:
    """One per gateway process. Run `run()` beside the bus and the view; they are started by the caller."""

    def __init__(
        self,
        bus: Bus,
        view: RegistryView,
        dispatch_loop: DispatchLoop,
        sender: Sender,
        *,
        observer: DispatchObserver,
        retry_limits: RetryLimits,
        admission_limits: AdmissionLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._view, self._dispatch_loop, self._sender = bus, view, dispatch_loop, sender
        self._observer, self._clock = observer, clock
        self._retry_limits, self._admission_limits = retry_limits, admission_limits
        self._exchange = Exchange(bus, view, dispatch_loop, sender.gateway_id, observer=observer, clock=clock)
        self._is_draining = False
        view.on_change(self.tick)

    @property
    def readiness(self) -> Readiness:
        """Whether any new request would be served (or held), why not, and how many are in hand."""
        can_serve = any(self._dispatch_loop.placement.router.usable(self._view.workers))
        if self._is_draining:
            reason = ReadyReason.DRAINING
        elif not self._bus.is_up:
            reason = ReadyReason.BUS_UNREACHABLE
        elif not can_serve and not self._admission_limits.max_held_requests:
            reason = ReadyReason.NO_WORKERS
        else:
            reason = ReadyReason.READY
        return Readiness(
            ready=reason is ReadyReason.READY,
            reason=reason,
            message=_NOT_READY.get(reason, "This gateway takes requests."),
            load=ReadyLoad(num_running=self.num_inflight, num_waiting=len(self._dispatch_loop.queue)),
        )

    @property
    def max_total_tokens(self) -> int | None:
        """Prompt and output tokens that every pair can hold; None while there is no pair."""
        prefill, decode = self._dispatch_loop.placement.router.usable(self._view.workers)
        usable = [worker.num_blocks * worker.block_size for worker in prefill]
        usable += [(worker.num_blocks - 1) * worker.block_size for worker in decode]
        return min([*usable, *(worker.max_model_len for worker in [*prefill, *decode])], default=None)

    @property
    def num_inflight(self) -> int:
        """Requests that have come in and not ended."""
        return len(self._exchange.requests)

    def submit(self, request: GenerationRequest) -> Generation:
        """Take a request in and send it if a worker has room.

        Raises:
            InvalidRequestError: it can never fit.
            OverloadedError: the queue is full, or the wait would outlast the deadline.
            UnavailableError: no workers for it, no bus, or this gateway is shutting down.
        """
        now_s, placement = self._clock(), self._dispatch_loop.placement
        demand = Demand(request, placement.router.disaggregation.is_local(request))
        computing = placement.computing(demand, self._view.workers)
        refusal = admission.check(request, self._service(demand, computing, now_s), self._admission_limits)
        if refusal is not None:
            if refusal.error.status != 400:
                self._observer.shed(refusal.reason)
            raise refusal.error
        self._observer.predicted_cached_tokens(placement.most_guessed_tokens(demand, computing))
        generation = Generation(
            request,
            on_cancel=partial(self._exchange.cancel, request.request_id),
            on_finish_choice=partial(self._exchange.finish_choice, request.request_id),
            clock=self._clock,
        )
        generation.waterfall.note_queued(now_s)
        machines = [SequenceMachine(request, n, self._sender, self._retry_limits) for n in range(request.n)]
        self._exchange.add([LiveSequence(machine, generation, demand) for machine in machines], now_s)
        return generation

    async def run(self) -> None:
        """Read tokens and keep time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._exchange.run())
            tasks.create_task(self._tick_forever())

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what is in hand finish, and end the rest with an error."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange.wait_until_empty()
        except TimeoutError:
            self._exchange.fail_all(admission.shutdown_error(), CancelReason.SHUTDOWN)

    def tick(self) -> None:
        """Do what is due, and tell the observer how much there is."""
        self._exchange.tick(self._clock())
        self._observer.set_load(
            queued_requests=len(self._dispatch_loop.queue),
            queued_tokens=self._dispatch_loop.queue.num_tokens,
            inflight=self.num_inflight,
            held=self._dispatch_loop.num_held,
        )

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                _log.exception("a tick of the dispatcher failed: a programming error")

    def _service(self, demand: Demand, computing: list[WorkerRegistration], now_s: float) -> ServiceView:
        """What admission looks at; `computing`: the workers that may compute this prompt."""
        queue, placement = self._dispatch_loop.queue, self._dispatch_loop.placement
        return ServiceView(
            now_s=now_s,
            num_queued_requests=len(queue),
            num_queued_tokens=queue.num_tokens,
            max_total_tokens=self.max_total_tokens,
            has_workers=placement.has_workers(demand, self._view.workers),
            is_stream_full=placement.are_inboxes_full(computing),
            num_tokens_ahead=queue.num_tokens + placement.num_outstanding_tokens(computing),
            prefill_tokens_per_s=sum(worker.load.tokens_per_s for worker in computing),
            bus_down_s=self._exchange.bus_down_s(now_s),
            is_draining=self._is_draining,
        )
