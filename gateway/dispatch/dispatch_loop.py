"""Moves what waits: queued prompts to prefill workers, started ones to decode workers; fails what waited too long.

In words: hand-offs first, for a prefill worker already holds memory for them; then the queue in its order. An entry
whose worker is full keeps its place: no entry further behind may take that worker before it, but others may go to
other workers. Pure: what is to be done for a sequence is returned with it, and exchange.py does it.

Order of the queue: re-dispatches first (their clients are already reading), then by priority with ageing. Ageing is
linear, so the order of two entries never changes while they wait: one priority level weighs as much as `ageing_s` of
waiting, which makes starvation impossible and a sorted list sufficient.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.errors import RequestError
from pdserve.gateway.dispatch import admission, recovery
from pdserve.gateway.dispatch.actions import Action
from pdserve.gateway.dispatch.live import LiveSequence
from pdserve.gateway.routing.placement import Placement, Wait
from pdserve.gateway.routing.router import Demand, Workers
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
    """Sequences whose client has begun to read."""
    is_holding: bool = False


@dataclass(slots=True, eq=False)
class QueueEntry:
    """What goes out together: a new request with all its choices, or one sequence that lost its workers."""

    sequences: list[LiveSequence]
    num_tokens: int
    """Prompt tokens to compute, at most."""
    queued_s: float
    is_redispatch: bool = False
    not_before_s: float = float("-inf")
    """End of a re-dispatch's back-off."""
    no_pair_since_s: float | None = None
    """Since when no pair of workers is there for it."""
    rank: tuple[int, float, int] = field(default=(0, 0.0, 0))
    """The place in the order, set by the queue."""


class WaitingQueue:
    """Entries ordered by rank, and the number of tokens in them."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._entries: list[QueueEntry] = []
        self._numbers = itertools.count()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        """In the order of dispatch, over a snapshot: entries may be removed meanwhile."""
        return iter(tuple(self._entries))

    def push(self, entry: QueueEntry, priority: int) -> None:
        """Queue an entry at its place; a lower priority goes sooner."""
        due_s = entry.queued_s + priority * self._ageing_s
        entry.rank = (0 if entry.is_redispatch else 1, due_s, next(self._numbers))
        bisect.insort(self._entries, entry, key=_rank)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: QueueEntry) -> None:
        """Take an entry out; it must be queued."""
        index = bisect.bisect_left(self._entries, entry.rank, key=_rank)
        assert index < len(self._entries), f"entry {entry.rank} is not queued"
        assert self._entries[index] is entry, f"entry {entry.rank} is not queued"
        del self._entries[index]
        self.num_tokens -= entry.num_tokens


def _rank(entry: QueueEntry) -> tuple[int, float, int]:
    return entry.rank


class DispatchLoop:
    """The queue, and the hand-offs without a decode worker."""

    def __init__(self, placement: Placement, limits: WaitLimits, *, ageing_s: float = 10.0) -> None:
        self.placement = placement
        self.queue = WaitingQueue(ageing_s)
        self.num_held = 0
        """Queued entries for which there is no pair of workers."""
        self._limits = limits
        self._entry_of: dict[SequenceKey, QueueEntry] = {}
        self._wanting: dict[SequenceKey, LiveSequence] = {}

    # --- in and out

    def add_new(self, sequences: list[LiveSequence], now_s: float) -> None:
        """Queue a request: its choices go out together."""
        self._push(QueueEntry(list(sequences), sequences[0].demand.num_tokens, now_s))

    def add_again(self, live: LiveSequence, not_before_s: float, now_s: float) -> None:
        """Queue a sequence whose attempt ended: original prompt plus what was emitted."""
        live.demand = Demand(live.demand.request, live.demand.is_local, output=list(live.machine.output))
        self._wanting.pop(live.machine.key, None)
        num_tokens = live.demand.num_tokens
        self._push(QueueEntry([live], num_tokens, now_s, is_redispatch=True, not_before_s=not_before_s))

    def want_decode(self, live: LiveSequence, now_s: float, workers: Workers, epoch: int) -> list[Action]:
        """A hand-off needs a decode worker: now, or as soon as there is room."""
        self._wanting[live.machine.key] = live
        return self._bind(live, now_s, workers, epoch)

    def remove(self, live: LiveSequence) -> None:
        """The sequence is over and waits for nothing."""
        self._wanting.pop(live.machine.key, None)
        entry = self._entry_of.pop(live.machine.key, None)
        if entry is not None:
            entry.sequences.remove(live)
            if not entry.sequences:
                self.queue.remove(entry)

    # --- rounds

    def round(self, now_s: float, workers: Workers, epoch: int) -> Iterator[tuple[LiveSequence, list[Action]]]:
        """Whatever can go, each sequence with the actions that send it."""
        for live in tuple(self._wanting.values()):
            if actions := self._bind(live, now_s, workers, epoch):
                yield live, actions
        blocked: set[WorkerRef] = set()
        num_misses = 0
        for entry in self.queue:
            if num_misses >= MAX_MISSES:
                break
            if not entry.sequences or entry.not_before_s > now_s:
                continue
            demand = entry.sequences[0].demand
            find = self.placement.find_local if demand.is_local else self.placement.find_prefill
            found = find(demand, workers, now_s, blocked)
            if isinstance(found, Wait):
                num_misses += 1
                continue
            self.queue.remove(entry)
            for live in entry.sequences:
                del self._entry_of[live.machine.key]
                yield live, self._start(live, found, now_s, epoch)

    def expire(
        self, now_s: float, workers: Workers, *, bus_down_s: float
    ) -> Iterator[tuple[LiveSequence, RequestError]]:
        """What waited too long for workers or a bus that do not come, each with its error."""
        self.num_held = 0
        for entry in self.queue:
            if not entry.sequences:
                continue  # its request failed with an earlier entry
            if bus_down_s > 0:
                if not entry.is_redispatch and bus_down_s > self._limits.bus_timeout_s:
                    yield entry.sequences[0], admission.bus_error()
            elif self.placement.has_workers(entry.sequences[0].demand, workers):
                entry.no_pair_since_s = None
            else:
                self.num_held += 1
                if self._is_expired(entry, now_s):
                    yield entry.sequences[0], admission.no_workers_error()

    def _is_expired(self, entry: QueueEntry, now_s: float) -> bool:
        if entry.no_pair_since_s is None:
            entry.no_pair_since_s = now_s
        limits = self._limits
        new_limit_s = limits.hold_timeout_s if limits.is_holding else limits.bus_timeout_s
        return now_s - entry.no_pair_since_s > (limits.redispatch_wait_s if entry.is_redispatch else new_limit_s)

    # --- one entry, one hand-off

    def _push(self, entry: QueueEntry) -> None:
        self._entry_of.update({live.machine.key: entry for live in entry.sequences})
        self.queue.push(entry, entry.sequences[0].demand.request.priority)

    def _start(self, live: LiveSequence, worker: WorkerRegistration, now_s: float, epoch: int) -> list[Action]:
        ref, machine, placement = worker.ref, live.machine, self.placement
        live.generation.waterfall.note_dispatched(machine.key.choice, now_s)
        if live.demand.is_local:
            live.prefill, live.held_decode = None, ref
            placement.take_decode(machine.key, live.demand, worker, now_s)
            return machine.dispatch_local(ref, now_s, epoch)
        live.prefill, live.held_prefill = worker, ref
        live.num_guessed_tokens = placement.num_guessed_tokens(live.demand, worker)
        placement.take_prefill(machine.key, live.demand, worker, now_s)
        return machine.dispatch(ref, now_s, epoch)

    def _bind(self, live: LiveSequence, now_s: float, workers: Workers, epoch: int) -> list[Action]:
        machine, attempt = live.machine, live.machine.attempt
        if attempt is None or not machine.wants_decode:
            self._wanting.pop(machine.key, None)
            return []
        assert live.prefill is not None, f"{attempt.key} has no prefill worker to hand over from"
        found = self.placement.find_decode(live.demand, workers, now_s, live.prefill, attempt.refused)
        if found is Wait.ALL_REFUSED:
            self._wanting.pop(machine.key, None)
            return recovery.on_all_refused(machine, now_s)
        if isinstance(found, Wait):
            return []
        self._wanting.pop(machine.key, None)
        live.held_decode = found.ref
        self.placement.take_decode(machine.key, live.demand, found, now_s)
        return machine.assign_decode(found.ref, now_s, epoch)
