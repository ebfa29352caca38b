"""Moves what waits: queued prompts to prefill workers, started ones to decode workers; fails what waited too long.

In words: hand-offs first, for a prefill worker already holds memory for them; then the queue in its order. An entry
whose worker is full keeps its place: nobody further behind may take that worker before it, but others may go
to other workers. Sends nothing itself: the state machines' actions go to `perform`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import RequestError
from pdserve.gateway.dispatch import admission
from pdserve.gateway.dispatch.actions import Action
from pdserve.gateway.dispatch.live import LiveSequence
from pdserve.gateway.dispatch.waiting_queue import QueueEntry, WaitingQueue
from pdserve.gateway.routing.placement import Demand, Placement, Wait, Workers
from pdserve.messages import SequenceKey
from pdserve.registration import WorkerRef, WorkerRegistration
from pdserve.settings import GatewaySettings

MAX_MISSES = 16
"""Entries that may find no room before a round gives up: bounds its time under overload."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long something may wait for workers that are not there. Seconds."""

    bus_timeout_s: float = GatewaySettings.bus_timeout_s
    """New requests, and everything new while the bus is away."""
    hold_timeout_s: float = GatewaySettings.hold_timeout_s
    """New requests that are held for a pool that scales from zero."""
    redispatch_wait_s: float = GatewaySettings.redispatch_wait_s
    """Sequences that somebody already reads."""
    is_holding: bool = False


class DispatchLoop:
    """The queue and the hand-offs without a decode worker."""

    def __init__(
        self,
        placement: Placement,
        limits: WaitLimits,
        *,
        ageing_s: float,
        perform: Callable[[LiveSequence, list[Action], float], None],
        fail: Callable[[LiveSequence, RequestError], None],
    ) -> None:
        self.queue: WaitingQueue[list[LiveSequence]] = WaitingQueue(ageing_s)
        self.num_held = 0
        """Queued entries for which there is no pair of workers."""
        self._placement, self._limits, self._perform, self._fail = placement, limits, perform, fail
        self._wanting: dict[SequenceKey, LiveSequence] = {}

    # --- in and out

    def add_new(self, sequences: list[LiveSequence], now_s: float) -> None:
        """Queue a request: its choices go out together."""
        spec = sequences[0].machine.spec
        entry = QueueEntry(sequences, len(spec.prompt_token_ids), now_s, priority=spec.priority)
        self._push(entry)

    def add_again(self, live: LiveSequence, not_before_s: float, now_s: float) -> None:
        """Queue a sequence whose attempt ended: original prompt plus what was emitted."""
        spec, output = live.machine.spec, live.machine.output
        before = live.demand
        live.demand = Demand(
            spec.prompt_token_ids + output,
            num_choices=1,
            will_decode=spec.num_left(output) > 1,
            is_local=before.is_local,
            cache_salt=before.cache_salt,
            pinned_prefill=before.pinned_prefill,
            pinned_decode=before.pinned_decode,
            is_pin_strict=False,
        )
        self._wanting.pop(live.key, None)
        num_tokens = len(live.demand.token_ids)
        self._push(QueueEntry([live], num_tokens, now_s, spec.priority, is_redispatch=True, not_before_s=not_before_s))

    def want_decode(self, live: LiveSequence, now_s: float, workers: Workers, epoch: int) -> None:
        """A hand-off needs a decode worker: now, or as soon as there is room."""
        self._wanting[live.key] = live
        self._bind(live, now_s, workers, epoch)

    def remove(self, live: LiveSequence) -> None:
        """The sequence is over."""
        self._wanting.pop(live.key, None)
        entry, live.entry = live.entry, None
        if entry is not None:
            entry.item.remove(live)
            if not entry.item:
                self.queue.remove(entry)

    # --- rounds

    def round(self, now_s: float, workers: Workers, epoch: int) -> None:
        """Dispatch whatever can go."""
        for live in tuple(self._wanting.values()):
            self._bind(live, now_s, workers, epoch)
        blocked: set[WorkerRef] = set()
        num_misses = 0
        for entry in self.queue:
            if num_misses >= MAX_MISSES:
                break
            is_due = bool(entry.item) and entry.not_before_s <= now_s
            if is_due and not self._dispatch(entry, now_s, workers, epoch, blocked):
                num_misses += 1

    def expire(self, now_s: float, workers: Workers, *, bus_down_s: float) -> None:
        """Fail what waits for workers or a bus that do not come."""
        self.num_held = 0
        for entry in self.queue:
            if not entry.item:
                continue  # its request failed with an earlier entry
            if bus_down_s > 0:
                if not entry.is_redispatch and bus_down_s > self._limits.bus_timeout_s:
                    self._fail(entry.item[0], admission.bus_error())
            elif self._placement.has_workers(entry.item[0].demand, workers):
                entry.no_pair_since_s = None
            else:
                self.num_held += 1
                self._expire_without_pair(entry, now_s)

    def _expire_without_pair(self, entry: QueueEntry[list[LiveSequence]], now_s: float) -> None:
        if entry.no_pair_since_s is None:
            entry.no_pair_since_s = now_s
        limits = self._limits
        new_limit_s = limits.hold_timeout_s if limits.is_holding else limits.bus_timeout_s
        limit_s = limits.redispatch_wait_s if entry.is_redispatch else new_limit_s
        if now_s - entry.no_pair_since_s > limit_s:
            self._fail(entry.item[0], admission.no_workers_error())

    # --- one entry

    def _push(self, entry: QueueEntry[list[LiveSequence]]) -> None:
        for live in entry.item:
            live.entry = entry
        self.queue.push(entry)

    def _dispatch(
        self,
        entry: QueueEntry[list[LiveSequence]],
        now_s: float,
        workers: Workers,
        epoch: int,
        blocked: set[WorkerRef],
    ) -> bool:
        demand = entry.item[0].demand
        if demand.is_local:
            found = self._placement.find_local(demand, workers, now_s, blocked)
        else:
            found = self._placement.find_prefill(demand, workers, now_s, blocked)
        if isinstance(found, Wait):
            return False
        self.queue.remove(entry)
        for live in entry.item:
            live.entry = None
            live.generation.waterfall.note_dispatched(live.key.choice, now_s)
            live.generation.note_event("dispatched", now_s)
            self._start(live, found, now_s, epoch)
        return True

    def _start(self, live: LiveSequence, worker: WorkerRegistration, now_s: float, epoch: int) -> None:
        ref, placement = worker.ref, self._placement
        if live.demand.is_local:
            live.prefill, live.held_decode = None, ref
            actions = live.machine.dispatch_local(ref, now_s, epoch)
            placement.take_decode(live.key, live.demand, worker, now_s)
        else:
            live.prefill, live.held_prefill = worker, ref
            live.num_guessed_tokens = placement.num_guessed_tokens(live.demand, worker)
            actions = live.machine.dispatch(ref, now_s, epoch)
            placement.take_prefill(live.key, live.demand, worker, now_s)
        live.note_attempt()
        self._perform(live, actions, now_s)

    def _bind(self, live: LiveSequence, now_s: float, workers: Workers, epoch: int) -> None:
        attempt = live.machine.attempt
        if attempt is None or not attempt.wants_decode:
            self._wanting.pop(live.key, None)
            return
        assert live.prefill is not None, f"{attempt.key} has no prefill worker to hand over from"
        found = self._placement.find_decode(live.demand, workers, now_s, live.prefill, attempt.refused)
        if found is Wait.ALL_REFUSED:
            self._wanting.pop(live.key, None)
            self._perform(live, live.machine.no_decode_worker(now_s), now_s)
        elif not isinstance(found, Wait):
            del self._wanting[live.key]
            ref = found.ref
            live.held_decode = ref
            actions = live.machine.assign_decode(ref, now_s, epoch)
            self._placement.take_decode(live.key, live.demand, found, now_s)
            live.note_attempt()
            live.generation.note_event("handed_off", now_s)
            self._perform(live, actions, now_s)
