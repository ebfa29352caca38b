"""The dispatcher: owner of every request between the HTTP layer and the workers. Step 3 of 8 of a request's way.

Before: request.py, a `GenerationRequest`. After: a worker's inbox (prefill_worker/, decode_worker/), and for what comes
back, the request's `Generation`, which the HTTP layer turns into SSE.

This file is an edge: it reads the gateway's one token stream, asks the clock, and performs what the pure parts
decide (sequence_machine.py: one sequence; dispatch_loop.py, placement.py, router.py, waiting_queue.py: who goes where
and when; admission.py: who comes in). It sends nothing blindly when the bus or a worker fails: rosters and timers
tell the state machines.
Used on the event loop only; handling one bus entry never awaits, so a client wakes once for all of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import RegistryView
from pdserve.errors import RequestError
from pdserve.gateway.dispatch import actions as act
from pdserve.gateway.dispatch import admission
from pdserve.gateway.dispatch.actions import Action
from pdserve.gateway.dispatch.admission import AdmissionLimits, AdmissionView
from pdserve.gateway.dispatch.dispatch_loop import DispatchLoop, WaitLimits
from pdserve.gateway.dispatch.inbound import Inbound
from pdserve.gateway.dispatch.jobs import SequenceSpec
from pdserve.gateway.dispatch.live import LiveSequence, LiveTable
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import FailedEvent, FinishedEvent, Generation, GenerationRequest, TokensEvent
from pdserve.gateway.observers import DispatchObserver, SilentObserver
from pdserve.gateway.routing.disaggregation import Disaggregation
from pdserve.gateway.routing.placement import Demand, Placement
from pdserve.gateway.routing.router import Pairs, Place, Router
from pdserve.ids import Fingerprint, GatewayId, RequestId
from pdserve.log import get_logger
from pdserve.reasons import CancelReason
from pdserve.registration import Role, WorkerRef, WorkerRegistration

_log = get_logger(__name__)

TICK_S = 0.1
"""Timers are this late at most; nothing that a client sees on a good day waits for a tick."""


class Dispatcher:
    """One per gateway process. Run `run()` beside the bus and the view; they are started by the caller."""

    def __init__(
        self,
        bus: Bus,
        view: RegistryView,
        card_fingerprint: str,
        *,
        gateway_id: str,
        eos_token_ids: frozenset[int] = frozenset(),
        retry_limits: RetryLimits | None = None,
        admission_limits: AdmissionLimits | None = None,
        wait_limits: WaitLimits | None = None,
        disaggregation: Disaggregation | None = None,
        ageing_s: float = 10.0,
        place: Place | None = None,
        observer: DispatchObserver | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._view, self._fingerprint, self._gateway_id = bus, view, card_fingerprint, gateway_id
        self._eos_token_ids, self._clock = eos_token_ids, clock
        self._disaggregation = disaggregation or Disaggregation()
        self._retry_limits = retry_limits or RetryLimits()
        self._admission_limits = admission_limits or AdmissionLimits()
        self._observer = observer or SilentObserver()
        self._router = Router(card_fingerprint, rng=rng or random.Random(), place=place)
        self._placement = Placement(
            self._router, settle_after_s=self._retry_limits.roster_grace_s / 4, is_inbox_full=self._is_inbox_full
        )
        self._dispatch_loop = DispatchLoop(
            self._placement,
            wait_limits or WaitLimits(),
            ageing_s=ageing_s,
            perform=self._perform,
            fail=self._fail,
        )
        self._table = LiveTable()
        self._seen: dict[str, WorkerRegistration] = {}
        self._bus_epoch = 0
        self._bus_down_since_s: float | None = None
        self._is_draining = False
        self._is_dispatch_due = False
        self._inbound = Inbound(
            bus,
            self._table,
            self._placement.prefixes,
            perform=self._perform,
            epoch=lambda: self._bus_epoch,
            clock=clock,
        )
        self._reader = StreamReader(bus, bus.keys.tokens(gateway_id), self._inbound.handle)
        bus.on_new_server(self._note_new_server)
        view.on_change(self.tick)

    # --- for the HTTP layer

    @property
    def is_ready(self) -> bool:
        """Whether any new request would be served: the bus answers and a pair is there (or requests are held).

        Without disaggregation a decode worker is enough.
        """
        can_hold = self._admission_limits.max_held_requests > 0
        return self._bus.is_up and not self._is_draining and (can_hold or any(self._usable()))

    @property
    def max_total_tokens(self) -> int | None:
        """Prompt and output tokens that every pair can hold; None while there is no pair."""
        prefill, decode = self._usable()
        usable = [worker.num_blocks * worker.block_size for worker in prefill]
        usable += [(worker.num_blocks - 1) * worker.block_size for worker in decode]
        return min([*usable, *(worker.max_model_len for worker in [*prefill, *decode])], default=None)

    @property
    def num_inflight(self) -> int:
        """Requests that have come in and not ended."""
        return self._table.num_requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Take a request in and send it if a worker has room.

        Raises:
            InvalidRequestError: it can never fit.
            OverloadedError: the queue is full, or the wait would outlast the deadline.
            UnavailableError: no workers for it, no bus, or this gateway is shutting down.
        """
        now_s = self._clock()
        demand = self._demand(request)
        refusal = admission.check(request, self._admission_view(demand, now_s), self._admission_limits)
        if refusal is not None:
            if refusal.error.status != 400:
                self._observer.shed(refusal.reason)
            raise refusal.error
        computing = self._placement.computing(demand, self._view.workers)
        guesses = (self._placement.num_guessed_tokens(demand, worker) for worker in computing)
        self._observer.predicted_cached_tokens(max(guesses, default=0))
        generation = self._open(request, demand, now_s)
        self._dispatch_now(now_s)
        return generation

    async def run(self) -> None:
        """Read tokens and keep time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reader.run())
            tasks.create_task(self._tick_forever())

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what is in hand finish, and end the rest with an error."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._table.wait_until_empty()
        except TimeoutError:
            for live in self._table.first_of_each_request():
                self._observer.cancelled(CancelReason.SHUTDOWN)
                self._fail(live, admission.shutdown_error())

    # --- requests in and out

    def _demand(self, request: GenerationRequest) -> Demand:
        return Demand(
            request.prompt_token_ids,
            num_choices=request.n,
            will_decode=request.sampling.max_tokens > 1,
            is_local=self._disaggregation.is_local(request),
            cache_salt=request.cache_salt,
            pinned_prefill=request.pinned_prefill,
            pinned_decode=request.pinned_decode,
        )

    def _admission_view(self, demand: Demand, now_s: float) -> AdmissionView:
        computing = self._placement.computing(demand, self._view.workers)
        outstanding = sum(self._placement.prefill_windows.total(worker.ref) for worker in computing)
        return AdmissionView(
            now_s=now_s,
            num_queued_requests=len(self._dispatch_loop.queue),
            num_queued_tokens=self._dispatch_loop.queue.num_tokens,
            max_total_tokens=self.max_total_tokens,
            has_workers=self._placement.has_workers(demand, self._view.workers),
            is_stream_full=bool(computing) and all(self._is_inbox_full(worker.ref) for worker in computing),
            num_tokens_ahead=self._dispatch_loop.queue.num_tokens + outstanding,
            prefill_tokens_per_s=sum(worker.load.tokens_per_s for worker in computing),
            bus_down_s=self._bus_down_s(now_s),
            is_draining=self._is_draining,
        )

    def _open(self, request: GenerationRequest, demand: Demand, now_s: float) -> Generation:
        request_id = request.request_id
        generation = Generation(
            request,
            on_cancel=lambda reason: self._cancel(request_id, reason),
            on_finish_choice=lambda choice: self._finish_choice(request_id, choice),
            clock=self._clock,
        )
        sequences = [
            LiveSequence(SequenceMachine(self._spec(request, choice), self._retry_limits), generation, demand)
            for choice in range(request.n)
        ]
        self._table.add(request_id, sequences)
        generation.waterfall.note_queued(now_s)
        generation.note_event("queued", now_s)
        self._dispatch_loop.add_new(list(sequences), now_s)
        return generation

    def _spec(self, request: GenerationRequest, choice: int) -> SequenceSpec:
        return SequenceSpec(
            request_id=RequestId(request.request_id),
            choice=choice,
            gateway_id=GatewayId(self._gateway_id),
            fingerprint=Fingerprint(self._fingerprint),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            deadline_s=request.deadline_s,
            priority=request.priority,
            cache_salt=request.cache_salt,
            eos_token_ids=self._eos_token_ids,
        )

    def _stop(self, live: LiveSequence, reason: CancelReason) -> None:
        """Cancel a sequence everywhere, without a word to its client."""
        now_s = self._clock()
        self._perform(live, live.machine.cancel(reason, now_s), now_s)

    def _cancel(self, request_id: str, reason: CancelReason) -> None:
        self._observer.cancelled(reason)
        for live in self._table.of_request(request_id):
            self._stop(live, reason)

    def _finish_choice(self, request_id: str, choice: int) -> None:
        live = self._table.get(request_id, choice)
        if live is not None:
            self._stop(live, CancelReason.FINISHED)

    def _fail(self, live: LiveSequence, error: RequestError) -> None:
        """End the whole request of this sequence with an error."""
        if error.code == "deadline_exceeded":
            self._observer.cancelled(CancelReason.DEADLINE)
        live.generation.push(FailedEvent(error))
        for sibling in self._table.of_request(live.key.request_id):
            self._stop(sibling, CancelReason.FAILED)

    # --- time

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                _log.exception("a tick of the dispatcher failed: a programming error")

    def tick(self) -> None:
        """Timers, dead workers, newer load figures, the queue."""
        now_s = self._clock()
        is_bus_up = self._bus.is_up and self._reader.is_connected
        if is_bus_up:
            self._bus_down_since_s = None
        elif self._bus_down_since_s is None:
            self._bus_down_since_s = now_s
        self._look_at_workers(now_s)
        for live in self._table.all():
            if not is_bus_up:
                live.machine.hold(now_s)
            self._perform(live, live.machine.on_tick(now_s), now_s)
        self._dispatch_loop.expire(now_s, self._view.workers, bus_down_s=self._bus_down_s(now_s))
        self._dispatch_now(now_s)
        self._observer.set_load(
            queued_requests=len(self._dispatch_loop.queue),
            queued_tokens=self._dispatch_loop.queue.num_tokens,
            inflight=self._table.num_requests,
            held=self._dispatch_loop.num_held,
        )

    def _look_at_workers(self, now_s: float) -> None:
        workers = self._view.workers
        for worker_id, before in self._seen.items():
            if worker_id not in workers or workers[worker_id].generation != before.generation:
                self._placement.forget(before.ref)
        for worker_id, worker in workers.items():
            if self._seen.get(worker_id) is not worker:
                self._placement.refresh(worker, now_s)
        self._seen = dict(workers)
        for ref in {ref for live in self._table.all() for ref in live.workers()}:
            if self._view.is_gone(ref):
                for live in self._table.all():
                    self._perform(live, live.machine.on_worker_gone(ref, now_s), now_s)

    def _bus_down_s(self, now_s: float) -> float:
        return 0.0 if self._bus_down_since_s is None else max(1e-9, now_s - self._bus_down_since_s)

    def _note_new_server(self) -> None:
        self._bus_epoch += 1

    def _usable(self) -> Pairs:
        """(prefill, decode) workers that requests are sent to; without disaggregation prefill workers are none."""
        workers = self._view.workers
        if self._disaggregation.needs_pairs:
            return self._router.pairs(workers)
        return [], self._router.ready(workers, Role.DECODE)

    def _is_inbox_full(self, worker: WorkerRef) -> bool:
        return self._bus.is_stream_full(self._bus.keys.inbox(*worker))

    def _dispatch_soon(self) -> None:
        """Once for everything that one bus entry frees."""
        if not self._is_dispatch_due:
            self._is_dispatch_due = True
            asyncio.get_running_loop().call_soon(lambda: self._dispatch_now(self._clock()))

    def _dispatch_now(self, now_s: float) -> None:
        self._is_dispatch_due = False
        if self._bus.is_up:
            self._dispatch_loop.round(now_s, self._view.workers, self._bus_epoch)

    # --- what the state machines want

    def _perform(self, live: LiveSequence, actions: list[Action], now_s: float) -> None:
        if len(actions) == 1 and live.held_prefill is None:
            (action,) = actions
            if isinstance(action, act.Emit) and isinstance(action.event, TokensEvent) and action.event.index > 1:
                live.generation.push(action.event)  # nearly every token: nothing else has changed
                return
        for action in actions:
            match action:
                case act.Emit(event=event):
                    self._emit(live, event, now_s)
                case act.Send(worker=worker, message=message):
                    self._bus.send(self._bus.keys.inbox(*worker), message)
                case act.WantDecode():
                    self._dispatch_loop.want_decode(live, now_s, self._view.workers, self._bus_epoch)
                case act.Requeue():
                    self._requeue(live, action, now_s)
                case act.Avoid(worker=worker, peer=peer):
                    self._router.avoid(worker, peer, now_s)
                case act.Dropped(num_tokens=num_tokens):
                    self._observer.dropped_tokens(num_tokens)
                case act.Diverged(index=index):
                    self._observer.diverged()
                    _log.error("%s got another token at index %d: attempt given up", live.key, index)
                case act.Fail(error=error):
                    live.note_attempt_end(error.code or "failed")
                    self._fail(live, error)
        self._settle(live)

    def _emit(self, live: LiveSequence, event: TokensEvent | FinishedEvent, now_s: float) -> None:
        generation = live.generation
        if isinstance(event, TokensEvent) and event.index <= 1:
            for index in range(event.index, min(2, event.index + len(event.token_ids))):
                generation.waterfall.note_token(event.choice, index, now_s)
            if event.index == 0:
                generation.note_event("first_token", now_s)
        elif isinstance(event, FinishedEvent):
            generation.note_event("finished", now_s)
        generation.push(event)

    def _requeue(self, live: LiveSequence, action: act.Requeue, now_s: float) -> None:
        live.note_attempt_end(action.reason)
        live.generation.note_event("redispatch", now_s)
        self._observer.redispatched(action.phase, action.reason)
        _log.info("%s goes back to the queue from %s: %s", live.key, action.phase, action.reason)
        self._dispatch_loop.add_again(live, action.not_before_s, now_s)
        self._dispatch_soon()

    def _settle(self, live: LiveSequence) -> None:
        """Give back what the sequence holds no more."""
        attempt = None if live.machine.is_done else live.machine.attempt
        prefill = attempt.prefill if attempt is not None and attempt.token0_s is None else None
        decode = attempt.decode if attempt is not None else None
        if live.held_prefill is not None and (prefill is None or prefill.worker != live.held_prefill):
            self._placement.prefill_windows.release(live.held_prefill, live.key)
            live.held_prefill = None
            self._dispatch_soon()
        if live.held_decode is not None and (decode is None or decode.worker != live.held_decode):
            self._placement.decode_windows.release(live.held_decode, live.key)
            live.held_decode = None
            self._dispatch_soon()
        if attempt is None:
            self._placement.release_unbound(live.key)
        if live.machine.is_done:
            self._dispatch_loop.remove(live)
            self._table.remove(live)
