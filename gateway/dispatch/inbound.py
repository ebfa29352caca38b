"""What workers say to this gateway: every message goes to the state machine of the sequence it is about. Step 7 and 9.

Before: a worker wrote to this gateway's stream, and bus/reader.py read it. After: dispatcher.py performs the machines'
actions. Unknown and late messages are dropped here or in the machine; what a worker holds for nobody is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.gateway.dispatch.actions import Action
from pdserve.gateway.dispatch.live import LiveSequence, LiveTable
from pdserve.gateway.routing.prefixes import PrefixMemory
from pdserve.log import get_logger
from pdserve.messages import (
    AnyMessage,
    Cancel,
    Failed,
    Finished,
    Roster,
    RosterItem,
    SequenceTokens,
    Started,
    TokenBatch,
)
from pdserve.reasons import CancelReason, SequenceState
from pdserve.registration import WorkerRef

_log = get_logger(__name__)

ORPHAN_STATES = frozenset({SequenceState.WAITING, SequenceState.RUNNING, SequenceState.RECEIVING})
"""States in which a sequence that nobody waits for costs a worker something that a Cancel ends."""


class Inbound:
    """Handler of the gateway's token stream. Never awaits: a bus entry is handled in one go."""

    def __init__(
        self,
        bus: Bus,
        table: LiveTable,
        prefixes: PrefixMemory,
        *,
        perform: Callable[[LiveSequence, list[Action], float], None],
        epoch: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._bus, self._table, self._prefixes = bus, table, prefixes
        self._perform, self._epoch, self._clock = perform, epoch, clock

    def handle(self, message: AnyMessage) -> None:
        """One message."""
        now_s = self._clock()
        match message:
            case TokenBatch():
                worker = message.worker
                for item in message.items:
                    self._on_tokens(item, worker, now_s)
            case Started():
                self._on_started(message, message.worker, now_s)
            case Finished() | Failed():
                self._on_end(message, message.worker, now_s)
            case Roster():
                self._on_roster(message, message.worker, now_s)
            case _:
                _log.warning("%s is no message for a gateway; dropped", type(message).__name__)

    def _on_tokens(self, item: SequenceTokens, worker: WorkerRef, now_s: float) -> None:
        live = self._table.get(item.request_id, item.choice)
        if live is None:
            return
        if item.timing is not None:
            _note_timing(live, item, worker)
        self._perform(live, live.machine.on_tokens(item, worker, now_s), now_s)

    def _on_started(self, message: Started, worker: WorkerRef, now_s: float) -> None:
        live = self._table.get(message.request_id, message.choice)
        if live is None:
            return
        attempt, generation = live.machine.attempt, live.generation
        prefill = attempt.prefill if attempt is not None and attempt.key == message.key else None
        if prefill is not None and prefill.worker == worker:
            generation.waterfall.note_schedule(message.choice, message.schedule_s)
            generation.note_event("started", now_s)
            self._prefixes.note_reported(worker, live.num_guessed_tokens, message.num_cached_tokens)
            if message.choice == 0 and not live.machine.output:
                generation.num_cached_tokens = message.num_cached_tokens
        self._perform(live, live.machine.on_started(message, worker, now_s), now_s)

    def _on_end(self, message: Finished | Failed, worker: WorkerRef, now_s: float) -> None:
        live = self._table.get(message.request_id, message.choice)
        if live is None:
            return
        machine = live.machine
        if isinstance(message, Finished):
            self._perform(live, machine.on_finished(message, worker, now_s), now_s)
        else:
            self._perform(live, machine.on_failed(message, worker, now_s), now_s)

    def _on_roster(self, roster: Roster, worker: WorkerRef, now_s: float) -> None:
        items = {item.key: item for item in roster.items}
        up_since_s = self._bus.up_since_s
        for live in self._table.all():
            attempt = live.machine.attempt
            if attempt is None or attempt.holder(worker) is None:
                continue
            actions = live.machine.on_roster(
                items.pop(attempt.key, None),
                worker,
                now_s,
                epoch=self._epoch(),
                bus_up_since_s=now_s if up_since_s is None else up_since_s,
            )
            self._perform(live, actions, now_s)
        for orphan in items.values():
            self._cancel_orphan(orphan, worker)

    def _cancel_orphan(self, item: RosterItem, worker: WorkerRef) -> None:
        """A worker holds an attempt that is over here: the Cancel was lost."""
        if item.state in ORPHAN_STATES:
            key = item.key
            cancel = Cancel(
                request_id=key.request_id,
                choice=key.choice,
                attempt=key.attempt,
                nonce=key.nonce,
                reason=CancelReason.ORPHAN,
            )
            self._bus.send(self._bus.keys.inbox(*worker), cancel)


def _note_timing(live: LiveSequence, item: SequenceTokens, worker: WorkerRef) -> None:
    """Durations that a worker of the current attempt measured."""
    attempt, timing = live.machine.attempt, item.timing
    if timing is None or attempt is None or attempt.key != item.key:
        return
    waterfall = live.generation.waterfall
    if attempt.prefill is None or attempt.prefill.worker == worker:
        waterfall.note_prefill(item.choice, timing.schedule_s, timing.prefill_s)
    else:
        waterfall.note_transfer(item.choice, timing.transfer_s, timing.transfer_bytes)
