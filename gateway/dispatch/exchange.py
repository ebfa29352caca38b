"""Step 3 of 8, and the return from steps 4 and 7: messages and time go in, actions come out and are performed.

It stands between the live sequences and their workers. Before: dispatcher.py let a request in. After: jobs
in workers' inboxes; and for what workers write to this gateway's stream, events in the request's `Generation`.

What a message means is decided by the machine of the sequence that it is about (sequence_machine.py, recovery.py),
who goes where by dispatch_loop.py; this file asks them and does what they say. Unknown and late messages are dropped
here or there; what a worker holds for no request is cancelled. Handling one bus entry never awaits, so a client
wakes once for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import RegistryView
from pdserve.errors import RequestError
from pdserve.gateway.dispatch import actions as act
from pdserve.gateway.dispatch import recovery
from pdserve.gateway.dispatch.actions import Action
from pdserve.gateway.dispatch.dispatch_loop import DispatchLoop
from pdserve.gateway.dispatch.live import LiveSequence
from pdserve.gateway.generation.request import FailedEvent, FinishedEvent, TokensEvent
from pdserve.gateway.observers import DispatchObserver
from pdserve.ids import GatewayId, RequestId, WorkerId
from pdserve.log import get_logger
from pdserve.messages import (
    AnyMessage,
    Cancel,
    Failed,
    Finished,
    Message,
    PromptLogprobs,
    Roster,
    SequenceTokens,
    Started,
    Timing,
    TokenBatch,
)
from pdserve.reasons import CancelReason, SequenceState
from pdserve.registration import WorkerRef, WorkerRegistration

_log = get_logger(__name__)

ORPHAN_STATES = frozenset({SequenceState.WAITING, SequenceState.RUNNING, SequenceState.RECEIVING})
"""States in which a sequence that no request waits for costs a worker something that a Cancel ends."""


def is_inbox_full(bus: Bus, worker: WorkerRef) -> bool:
    """Whether as many messages wait in the worker's inbox as the bus keeps."""
    return bus.is_stream_full(bus.keys.inbox(*worker))


class Exchange:
    """All live sequences of one gateway. Used on the event loop only."""

    def __init__(
        self,
        bus: Bus,
        view: RegistryView,
        dispatch_loop: DispatchLoop,
        gateway_id: GatewayId,
        *,
        observer: DispatchObserver,
        clock: Callable[[], float],
    ) -> None:
        self.requests: dict[RequestId, dict[int, LiveSequence]] = {}
        """Sequences that have not ended, by request id and choice."""
        self._bus, self._view, self._dispatch_loop = bus, view, dispatch_loop
        self._observer, self._clock = observer, clock
        self._placement = dispatch_loop.placement
        self._reader = StreamReader(bus, bus.keys.tokens(gateway_id), self._handle)
        self._is_empty = asyncio.Event()
        self._is_dispatch_due = False
        self._seen: dict[WorkerId, WorkerRegistration] = {}
        self._bus_epoch = 0
        self._bus_down_since_s: float | None = None
        bus.on_new_server(self._note_new_server)

    # --- for the dispatcher

    def add(self, sequences: list[LiveSequence], now_s: float) -> None:
        """Take in all choices of a new request, and send them if a worker has room."""
        request = sequences[0].generation.request
        assert request.request_id not in self.requests, f"request id {request.request_id} is taken"
        self.requests[request.request_id] = dict(enumerate(sequences))
        self._dispatch_loop.add_new(sequences, now_s)
        self._dispatch(now_s)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """The client wants no more of a request."""
        self._observer.cancelled(reason)
        for live in list(self.requests.get(request_id, {}).values()):
            self._stop(live, reason)

    def finish_choice(self, request_id: RequestId, choice: int) -> None:
        """The client has enough of one choice."""
        live = self.requests.get(request_id, {}).get(choice)
        if live is not None:
            self._stop(live, CancelReason.FINISHED)

    def fail_all(self, error: RequestError, reason: CancelReason) -> None:
        """End every request with an error."""
        for sequences in list(self.requests.values()):
            self._observer.cancelled(reason)
            self._fail(next(iter(sequences.values())), error)

    async def run(self) -> None:
        """Read this gateway's stream until cancelled."""
        await self._reader.run()

    async def wait_until_empty(self) -> None:
        """Return once the last sequence is over."""
        while self.requests:
            self._is_empty.clear()
            await self._is_empty.wait()

    def bus_down_s(self, now_s: float) -> float:
        """Time since the bus went away, in seconds; 0: it is there."""
        return 0.0 if self._bus_down_since_s is None else max(1e-9, now_s - self._bus_down_since_s)

    # --- time

    def tick(self, now_s: float) -> None:
        """Timers, dead workers, newer load figures, the queue."""
        is_bus_up = self._bus.is_up and self._reader.is_connected
        if is_bus_up:
            self._bus_down_since_s = None
        elif self._bus_down_since_s is None:
            self._bus_down_since_s = now_s
        self._look_at_workers(now_s)
        for live in self._all():
            if not is_bus_up:
                recovery.on_bus_down(live.machine, now_s)
            self._perform(live, recovery.on_tick(live.machine, now_s), now_s)
        for live, error in self._dispatch_loop.expire(now_s, self._view.workers, bus_down_s=self.bus_down_s(now_s)):
            self._fail(live, error)
        self._dispatch(now_s)

    def _look_at_workers(self, now_s: float) -> None:
        workers = self._view.workers
        for worker_id, before in self._seen.items():
            if worker_id not in workers or workers[worker_id].generation != before.generation:
                self._placement.forget(before.ref)
        for worker_id, worker in workers.items():
            if self._seen.get(worker_id) is not worker:
                self._placement.refresh(worker, now_s)
        self._seen = dict(workers)
        for ref in {holder.worker for live in self._all() for holder in live.machine.holders()}:
            if self._view.is_gone(ref):
                for live in self._all():
                    self._perform(live, recovery.on_worker_gone(live.machine, ref, now_s), now_s)

    def _all(self) -> list[LiveSequence]:
        """A snapshot: sequences may go meanwhile."""
        return [live for sequences in self.requests.values() for live in sequences.values()]

    def _note_new_server(self) -> None:
        self._bus_epoch += 1

    # --- what workers say

    def _handle(self, message: AnyMessage) -> None:
        now_s = self._clock()
        match message:
            case TokenBatch():
                worker = message.worker
                for item in message.items:
                    self._on_tokens(item, worker, now_s)
            case Started() | Finished() | Failed() | PromptLogprobs():
                live = self.requests.get(message.request_id, {}).get(message.choice)
                if live is not None:
                    self._on_progress(live, message, message.worker, now_s)
            case Roster():
                self._on_roster(message, message.worker, now_s)
            case _:
                _log.warning("%s is no message for a gateway; dropped", type(message).__name__)

    def _on_tokens(self, item: SequenceTokens, worker: WorkerRef, now_s: float) -> None:
        live = self.requests.get(item.request_id, {}).get(item.choice)
        if live is None:
            return
        event = live.machine.next_tokens(item, worker, now_s)
        if event is not None:
            live.generation.push(event)  # nearly every token: nothing else has changed
            return
        if item.timing is not None:
            _note_timing(live, item, item.timing, worker)
        self._perform(live, live.machine.on_tokens(item, worker, now_s), now_s)

    def _on_progress(
        self,
        live: LiveSequence,
        message: Started | Finished | Failed | PromptLogprobs,
        worker: WorkerRef,
        now_s: float,
    ) -> None:
        machine = live.machine
        match message:
            case Started():
                self._note_started(live, message, worker)
                actions = machine.on_started(message, worker, now_s)
            case PromptLogprobs():
                actions = machine.on_prompt_logprobs(message, worker, now_s)
            case Finished():
                actions = machine.on_finished(message, worker, now_s)
            case Failed():
                actions = recovery.on_failed(machine, message, worker, now_s)
        self._perform(live, actions, now_s)

    def _note_started(self, live: LiveSequence, message: Started, worker: WorkerRef) -> None:
        attempt, generation = live.machine.attempt, live.generation
        prefill = attempt.prefill if attempt is not None and attempt.key == message.key else None
        if prefill is None or prefill.worker != worker:
            return
        generation.waterfall.note_schedule(message.choice, message.schedule_s)
        self._placement.router.prefixes.note_reported(worker, live.num_guessed_tokens, message.num_cached_tokens)
        if message.choice == 0 and not live.machine.output:
            generation.num_cached_tokens = message.num_cached_tokens

    def _on_roster(self, roster: Roster, worker: WorkerRef, now_s: float) -> None:
        items = {item.key: item for item in roster.items}
        up_since_s = now_s if self._bus.up_since_s is None else self._bus.up_since_s
        for live in self._all():
            attempt = live.machine.attempt
            if attempt is None or not attempt.is_at(worker):
                continue
            item = items.pop(attempt.key, None)
            actions = recovery.on_roster(
                live.machine, item, worker, now_s, epoch=self._bus_epoch, bus_up_since_s=up_since_s
            )
            self._perform(live, actions, now_s)
        for key, orphan in items.items():
            if orphan.state in ORPHAN_STATES:  # over here: the Cancel was lost
                self._send(worker, Cancel(**key._asdict(), reason=CancelReason.ORPHAN))

    # --- what the machines want

    def _perform(self, live: LiveSequence, actions: list[Action], now_s: float) -> None:
        for action in actions:
            match action:
                case act.Emit(event=event):
                    self._emit(live, event, now_s)
                case act.Score(logprobs=logprobs):
                    live.generation.add_prompt_logprobs(logprobs)
                case act.Send(worker=worker, message=message):
                    self._send(worker, message)
                case act.WantDecode():
                    following = self._dispatch_loop.want_decode(live, now_s, self._view.workers, self._bus_epoch)
                    self._perform(live, following, now_s)
                case act.Requeue():
                    self._observer.redispatched(action.phase, action.reason)
                    _log.info("%s goes back to the queue from %s: %s", live.machine.key, action.phase, action.reason)
                    self._dispatch_loop.add_again(live, action.not_before_s, now_s)
                    self._dispatch_soon()
                case act.Avoid(worker=worker, peer=peer):
                    self._placement.router.avoid(worker, peer, now_s)
                case act.Dropped(num_tokens=num_tokens):
                    self._observer.dropped_tokens(num_tokens)
                case act.Diverged(index=index):
                    self._observer.diverged()
                    _log.error("%s got another token at index %d: attempt given up", live.machine.key, index)
                case act.Fail(error=error):
                    self._fail(live, error)
        self._settle(live)

    def _send(self, worker: WorkerRef, message: Message) -> None:
        self._bus.send(self._bus.keys.inbox(*worker), message)

    def _emit(self, live: LiveSequence, event: TokensEvent | FinishedEvent, now_s: float) -> None:
        if isinstance(event, TokensEvent) and event.index <= 1:
            for index in range(event.index, min(2, event.index + len(event.token_ids))):
                live.generation.waterfall.note_token(event.choice, index, now_s)
        live.generation.push(event)

    def _stop(self, live: LiveSequence, reason: CancelReason) -> None:
        """Cancel a sequence everywhere, without a word to its client."""
        self._perform(live, live.machine.cancel(reason), self._clock())

    def _fail(self, live: LiveSequence, error: RequestError) -> None:
        """End the whole request of this sequence with an error."""
        if error.code == "deadline_exceeded":
            self._observer.cancelled(CancelReason.DEADLINE)
        live.generation.push(FailedEvent(error))
        for sibling in list(self.requests.get(live.machine.key.request_id, {}).values()):
            self._stop(sibling, CancelReason.FAILED)

    def _settle(self, live: LiveSequence) -> None:
        """Give back what the sequence holds no more."""
        machine, placement = live.machine, self._placement
        attempt = machine.attempt
        prefill = attempt.prefill if attempt is not None and attempt.token0_s is None else None
        decode = attempt.decode if attempt is not None else None
        if live.held_prefill is not None and (prefill is None or prefill.worker != live.held_prefill):
            placement.prefill_windows.release(live.held_prefill, machine.key)
            live.held_prefill = None
            self._dispatch_soon()
        if live.held_decode is not None and (decode is None or decode.worker != live.held_decode):
            placement.decode_windows.release(live.held_decode, machine.key)
            live.held_decode = None
            self._dispatch_soon()
        if attempt is None:
            placement.release_unbound(machine.key)
        if machine.is_done:
            self._dispatch_loop.remove(live)
            self._remove(live)

    def _remove(self, live: LiveSequence) -> None:
        """The sequence is over; again: nothing."""
        key = live.machine.key
        siblings = self.requests.get(key.request_id)
        if siblings is None or siblings.pop(key.choice, None) is None:
            return
        if not siblings:
            del self.requests[key.request_id]
        if not self.requests:
            self._is_empty.set()

    # --- what waits

    def _dispatch_soon(self) -> None:
        """Once for everything that one bus entry frees."""
        if not self._is_dispatch_due:
            self._is_dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch_now)

    def _dispatch_now(self) -> None:
        self._dispatch(self._clock())

    def _dispatch(self, now_s: float) -> None:
        self._is_dispatch_due = False
        if self._bus.is_up:
            for live, actions in self._dispatch_loop.round(now_s, self._view.workers, self._bus_epoch):
                self._perform(live, actions, now_s)


def _note_timing(live: LiveSequence, item: SequenceTokens, timing: Timing, worker: WorkerRef) -> None:
    """Durations that a worker of the current attempt measured."""
    attempt, waterfall = live.machine.attempt, live.generation.waterfall
    if attempt is None or attempt.key != item.key:
        return
    if attempt.prefill is None or attempt.prefill.worker == worker:
        waterfall.note_prefill(item.choice, timing.schedule_s, timing.prefill_s)
    else:
        waterfall.note_transfer(item.choice, timing.transfer_s, timing.transfer_bytes)
