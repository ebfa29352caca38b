"""The decode side of all hand-offs: ask for blocks, READ what is announced, verify, release.

One request's way, steps 4 to 6 and 8. Every hand-off ends exactly once: received (`on_received`), failed
with no READ in flight (`on_hand_off_failed`), or aborted. KvRelease is sent when nothing of the prefill worker's
memory is being read any more, never before. Runs on the event loop; READs run in the transfer threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry, RegistryView
from pdserve.decode_worker.hand_off import HandOff
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.errors import BusError, TransferError
from pdserve.log import get_logger
from pdserve.messages import AttemptKey, KvFailed, KvReady, KvRelease, KvWant, LeaseRenewal
from pdserve.reasons import FailReason, KvFailReason, TransferReason
from pdserve.registration import Role, WorkerRef, WorkerRegistration
from pdserve.transfer.base import Descriptor
from pdserve.transfer.pulls.pull import PullOutcome
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.identity import Identity
from pdserve.worker.transports import WorkerTransports
from pdserve.worker.watch import WorkerWatch

logger = get_logger(__name__)


class HandOffListener(Protocol):
    """Who owns the sequences."""

    def on_received(self, hand_off: HandOff) -> None:
        """All blocks are here and verified, and token 0 is known."""
        ...

    def on_hand_off_failed(self, hand_off: HandOff, reason: FailReason) -> None:
        """It failed, and no READ is in flight any more."""
        ...


class HandOffs:
    """Every open hand-off of one decode worker.

    Args:
        may_prefill: LOCAL_PREFILL=auto: a failed hand-off waits for token 0 and is computed here.
        handoff_timeout_s: longest time without an announcement or a received block.
    """

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        engine_thread: EngineThread,
        transports: WorkerTransports,
        bus: Bus,
        registry: Registry,
        view: RegistryView,
        watch: WorkerWatch,
        *,
        kv_signature: str,
        may_prefill: bool,
        handoff_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._thread = engine_thread
        self._transports = transports
        self._bus = bus
        self._registry = registry
        self._view = view
        self._watch = watch
        self._kv_signature = kv_signature
        self._may_prefill = may_prefill
        self._handoff_timeout_s = handoff_timeout_s
        self._clock = clock
        self._listener: HandOffListener | None = None
        self._open: dict[AttemptKey, HandOff] = {}
        self._aborted: dict[AttemptKey, HandOff] = {}
        """Given up, but a READ may still write: blocks are quarantined, the prefill side keeps its lease."""

    def report_to(self, listener: HandOffListener) -> None:
        """Who is told how hand-offs end; set once, before the first one begins."""
        self._listener = listener

    def _listen(self) -> HandOffListener:
        assert self._listener is not None, "report_to comes first"
        return self._listener

    @property
    def num_open(self) -> int:
        """Hand-offs that are not over, aborted ones with active READs included."""
        return len(self._open) + len(self._aborted)

    @property
    def awaits_prompts(self) -> bool:
        """Whether some prefill worker is computing, or sending, a prompt for this worker. Any thread."""
        return bool(self._open)

    # --- begin

    def connect_to_peers(self) -> None:
        """Connect to every prefill worker that is registered, before its first hand-off needs it."""
        for registration in self._view.workers.values():
            if registration.role is Role.PREFILL and registration.kv_signature == self._kv_signature:
                self._transports.prepare(registration)

    async def find_peer(self, worker_id: str, generation: str) -> Descriptor | str:
        """The prefill worker named by a job, or a sentence why it cannot be read from."""
        registration = self._view.workers.get(worker_id)
        if registration is None or registration.generation != generation:
            try:
                registration = await self._registry.worker(worker_id)
            except BusError as error:
                return f"lookup of prefill worker {worker_id} failed: {error}"
        if registration is None or registration.generation != generation:
            return f"prefill worker {worker_id} of generation {generation} is not registered"
        return self._match(registration)

    def _match(self, registration: WorkerRegistration) -> Descriptor | str:
        if registration.kv_signature != self._kv_signature:
            return f"KV signature differs: theirs {registration.kv_signature}, ours {self._kv_signature}"
        try:
            return self._transports.find(registration)
        except TransferError as error:
            return str(error)

    def begin(self, sequence: Sequence, prefill: Descriptor, num_cached_blocks: int, chain: list[bytes]) -> None:
        """All blocks are reserved: ask the prefill worker for its own.

        Args:
            prefill: how its blocks are read.
            num_cached_blocks: leading blocks that our own prefix cache supplied.
            chain: chain hashes of the full prompt blocks, computed from our own copy of the prompt.
        """
        hand_off = HandOff(
            sequence, prefill, self._engine.block_size, num_cached_blocks, chain, progress_s=self._clock()
        )
        self._open[sequence.key] = hand_off
        self._send_want(hand_off)

    def _send_want(self, hand_off: HandOff) -> None:
        worker_id, generation = self._identity.peer
        want = KvWant(
            **hand_off.sequence.key._asdict(),
            worker_id=worker_id,
            generation=generation,
            kv_signature=self._kv_signature,
            backend=hand_off.descriptor.backend,
        )
        self._bus.send(self._bus.keys.inbox(*hand_off.peer), want)

    # --- what the prefill worker says

    def ready(self, message: KvReady) -> None:
        """Blocks are complete over there: READ those that we miss."""
        peer = message.worker
        hand_off = self._open.get(message.key)
        if hand_off is None:
            self._watch.late_message("finished")
            if message.key not in self._aborted:
                self._send_release(message.key, peer, is_complete=False)
            return
        if hand_off.peer != peer:
            self._watch.hand_off_rejected(KvFailReason.GENERATION)
            return
        hand_off.progress_s = self._clock()
        try:
            read = hand_off.announce(message)
        except TransferError as error:
            logger.error("hand-off %s: %s", message.key, error)
            self._fail(
                hand_off, FailReason.INTEGRITY if error.reason == TransferReason.VERIFY else FailReason.HANDOFF_FAILED
            )
            return
        if read is not None:
            hand_off.first_read_s = hand_off.first_read_s or self._clock()
            ticket = self._transports.pull(
                hand_off.descriptor,
                message.nonce,
                (read.remote_ids, read.local_ids, read.digests),
                on_end=self._on_pull,
                on_terminal=self._on_terminal,
            )
            hand_off.reads[ticket] = read.indices
        self._advance(hand_off)

    def failed(self, message: KvFailed) -> None:
        """The prefill worker cannot serve this hand-off (any more)."""
        hand_off = self._open.get(message.key)
        if hand_off is None or hand_off.peer != (message.worker_id, message.generation):
            self._watch.late_message("finished")
            return
        logger.warning("hand-off %s: prefill worker says %s", message.key, message.reason)
        self._lose_peer(hand_off, FailReason.HANDOFF_FAILED)

    # --- what the transfer threads say

    def _on_pull(self, outcome: PullOutcome) -> None:
        """A READ ended: its blocks are verified, or it failed and may not be over yet."""
        hand_off = self._owner(outcome.ticket)
        if hand_off is None:
            return
        self._watch.pulled(hand_off.descriptor.backend, outcome)
        if outcome.ok:
            hand_off.received(outcome.ticket, outcome.num_bytes, self._clock())
        elif outcome.is_terminal:
            del hand_off.reads[outcome.ticket]
        if not outcome.ok and hand_off.failure is None and hand_off.sequence.key in self._open:
            what = (hand_off.sequence.key, hand_off.peer, outcome.reason, outcome.detail)
            logger.warning("READ for %s from %s failed: %s %s", *what)
            self._fail(
                hand_off, FailReason.INTEGRITY if outcome.reason == TransferReason.VERIFY else FailReason.HANDOFF_FAILED
            )
        else:
            self._advance(hand_off)

    def _on_terminal(self, outcome: PullOutcome) -> None:
        """A READ that was given up can write no more."""
        hand_off = self._owner(outcome.ticket)
        if hand_off is not None:
            del hand_off.reads[outcome.ticket]
            self._advance(hand_off)

    def _owner(self, ticket: int) -> HandOff | None:
        for hand_off in (*self._open.values(), *self._aborted.values()):
            if ticket in hand_off.reads:
                return hand_off
        return None

    # --- progress and ends

    def _advance(self, hand_off: HandOff) -> None:
        if hand_off.sequence.key in self._aborted:
            self._settle_aborted(hand_off)
        elif hand_off.is_complete:
            self._close(hand_off)
            self._watch.received(hand_off.descriptor.backend, hand_off.transfer_s, hand_off.num_bytes)
            self._listen().on_received(hand_off)
        elif hand_off.failure is not None and not hand_off.reads:
            if hand_off.token0 is None and self._may_prefill and not hand_off.is_peer_lost:
                return  # token 0 comes with the last announcement
            self._close(hand_off)
            self._listen().on_hand_off_failed(
                hand_off, hand_off.failure if hand_off.token0 is not None else FailReason.NO_TOKEN0
            )

    def _fail(self, hand_off: HandOff, reason: FailReason) -> None:
        """READ nothing more; what is in flight must end first."""
        if hand_off.failure is None:
            hand_off.failure = reason
            for ticket in hand_off.reads:
                self._transports.abort(ticket)
        self._advance(hand_off)

    def _lose_peer(self, hand_off: HandOff, reason: FailReason) -> None:
        hand_off.is_peer_lost = True
        self._fail(hand_off, reason)

    def abort(self, key: AttemptKey) -> bool:
        """Give a hand-off up with its sequence; False: there is none, the caller frees the sequence itself."""
        hand_off = self._open.pop(key, None)
        if hand_off is None:
            return False
        for ticket in hand_off.reads:
            self._transports.abort(ticket)
        is_writing = bool(hand_off.reads)
        self._thread.post(lambda: self._engine.abort(hand_off.sequence, quarantine=is_writing))
        if is_writing:
            self._aborted[key] = hand_off
        else:
            self._send_release(key, hand_off.peer, is_complete=False)
        return True

    def _settle_aborted(self, hand_off: HandOff) -> None:
        if hand_off.reads:
            return
        key = hand_off.sequence.key
        del self._aborted[key]
        self._thread.post(lambda: self._engine.release_quarantine(key))
        self._send_release(key, hand_off.peer, is_complete=False)

    def _close(self, hand_off: HandOff) -> None:
        del self._open[hand_off.sequence.key]
        goes_on_here = hand_off.failure is None or (self._may_prefill and hand_off.token0 is not None)
        self._send_release(hand_off.sequence.key, hand_off.peer, is_complete=goes_on_here)

    def forget_all(self) -> None:
        """The transports were torn down: no READ is active any more."""
        for hand_off in list(self._aborted.values()):
            hand_off.reads.clear()
            self._settle_aborted(hand_off)

    # --- heartbeat

    def heartbeat(self, now_s: float) -> None:
        """Renew all KV leases, one message per prefill worker; give up what stands still or lost its peer."""
        self._renew()
        for hand_off in list(self._open.values()):
            if self._view.is_gone(hand_off.peer):
                logger.warning("prefill worker %s of hand-off %s is gone", hand_off.peer, hand_off.sequence.key)
                self._lose_peer(hand_off, FailReason.HANDOFF_FAILED)
            elif now_s - hand_off.progress_s > self._handoff_timeout_s:
                self._lose_peer(hand_off, FailReason.HANDOFF_TIMEOUT)
            elif not hand_off.num_announced_blocks:
                self._send_want(hand_off)  # the first one may have been lost; doubled ones are harmless

    def _renew(self) -> None:
        by_peer: dict[WorkerRef, list[HandOff]] = {}
        for hand_off in (*self._open.values(), *self._aborted.values()):
            by_peer.setdefault(hand_off.peer, []).append(hand_off)
        worker_id, generation = self._identity.peer
        for peer, hand_offs in by_peer.items():
            items = [hand_off.lease_item() for hand_off in hand_offs]
            renewal = LeaseRenewal(worker_id=worker_id, generation=generation, items=items)
            self._bus.send(self._bus.keys.inbox(*peer), renewal)

    def _send_release(self, key: AttemptKey, peer: WorkerRef, *, is_complete: bool) -> None:
        worker_id, generation = self._identity.peer
        message = KvRelease(**key._asdict(), worker_id=worker_id, generation=generation, is_complete=is_complete)
        self._bus.send(self._bus.keys.inbox(*peer), message)
