"""The decode policy: take over prompts that a prefill worker computed, and generate tokens.

One request's way, steps 3, 6, 8 and 9 (docs/architecture.md): a DecodeJob names the prefill worker; all
blocks are reserved or the job is refused at once; the hand-offs fill them (decode_worker/hand_offs.py); then
the sequence joins the batched decode loop, and each step sends ONE stream entry per gateway.
Before: prefill_worker/offers.py. After: gateway/dispatch/dispatcher.py.
It never samples output index 0 of a hand-off itself: token 0 comes from the prefill worker.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.decode_worker.hand_off import HandOff
from pdserve.decode_worker.hand_offs import HandOffs
from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.errors import InvalidRequestError, NoCapacityError
from pdserve.messages import AnyMessage, Cancel, DecodeJob, KvFailed, KvReady, ResendTokens, Timing
from pdserve.reasons import FailReason
from pdserve.registration import Role, WorkerLoad
from pdserve.worker.admission import Admission
from pdserve.worker.attempts import Attempt, Attempts
from pdserve.worker.engine_thread import EngineThread, StepFailure
from pdserve.worker.identity import Identity
from pdserve.worker.rates import StepRates
from pdserve.worker.tasks import TaskSet
from pdserve.worker.transports import WorkerTransports
from pdserve.worker.watch import WorkerWatch

_TOMBSTONE_S = 60.0
"""How long a Cancel that overtook its job is remembered (its deadline is unknown)."""


class DecodeWorker:
    """Policy of role decode; every method runs on the event loop."""

    role = Role.DECODE

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        engine_thread: EngineThread,
        transports: WorkerTransports,
        bus: Bus,
        attempts: Attempts,
        hand_offs: HandOffs,
        watch: WorkerWatch,
        *,
        fingerprint: str,
        may_prefill: bool,
        is_gateway_gone: Callable[[str], bool],
        is_draining: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._thread = engine_thread
        self._transports = transports
        self._bus = bus
        self.attempts = attempts
        self._hand_offs = hand_offs
        hand_offs.report_to(self)
        self._watch = watch
        self._may_prefill = may_prefill
        self._is_gateway_gone = is_gateway_gone
        self._clock = clock
        self._rates = StepRates()
        self._tasks = TaskSet()
        self._admission = Admission(attempts, watch, self._drop, fingerprint, engine.vocab_size, is_draining, clock)

    # --- messages

    def handle(self, message: AnyMessage) -> None:
        """One message from the inbox."""
        match message:
            case DecodeJob():
                self._admit(message)
            case Cancel():
                self._cancel(message)
            case ResendTokens():
                self.attempts.resend(message)
            case KvReady():
                self._hand_offs.ready(message)
            case KvFailed():
                self._hand_offs.failed(message)
            case _:
                self._watch.late_message("unknown")

    def _admit(self, job: DecodeJob) -> None:
        attempt = self._admission.take(job, is_prefill_only=False)
        if attempt is None:
            return
        chain = self._engine.chain_hashes(attempt.sequence)
        if job.prefill_worker_id is None or job.prefill_generation is None:
            self._tasks.spawn(self._prefill_locally(attempt))
        else:
            self._tasks.spawn(self._receive(attempt, job.prefill_worker_id, job.prefill_generation, chain))

    async def _prefill_locally(self, attempt: Attempt) -> None:
        """No hand-off: this worker computes the prompt and samples index 0 itself."""
        if self.attempts.get(attempt.key) is not attempt:
            return
        try:
            await self._thread.call(lambda: self._engine.add(attempt.sequence))
        except InvalidRequestError as error:
            self.fail(attempt, FailReason.TOO_LONG, retryable=False, detail=error.message)
        else:
            self._watch.job("accepted")

    async def _receive(self, attempt: Attempt, worker_id: str, generation: str, chain: list[bytes]) -> None:
        """Reserve all blocks or refuse at once, then ask the prefill worker for its own."""
        prefill = await self._hand_offs.find_peer(worker_id, generation)
        if isinstance(prefill, str):
            self.fail(attempt, FailReason.HANDOFF_FAILED, retryable=True, detail=prefill)
            return
        if self.attempts.get(attempt.key) is not attempt:
            return
        try:
            num_cached_blocks = await self._thread.call(lambda: self._engine.reserve(attempt.sequence))
        except NoCapacityError as error:
            self._watch.job("rejected")
            self.fail(attempt, FailReason.NO_CAPACITY, retryable=True, detail=str(error))
        except InvalidRequestError as error:
            self.fail(attempt, FailReason.TOO_LONG, retryable=False, detail=error.message)
        else:
            self._watch.job("accepted")
            if self.attempts.get(attempt.key) is attempt:
                self._hand_offs.begin(attempt.sequence, prefill, num_cached_blocks, chain)

    def _cancel(self, message: Cancel) -> None:
        attempt = self.attempts.get(message.key)
        if attempt is None:
            self.attempts.bury(message.key, self._clock() + _TOMBSTONE_S)
            return
        self._watch.job("cancelled")
        self._drop(attempt)

    # --- what hand-offs report

    def on_received(self, hand_off: HandOff) -> None:
        """All blocks are here and verified, token 0 is known: join the decode loop."""
        attempt = self.attempts.get(hand_off.sequence.key)
        if attempt is None or hand_off.token0 is None:
            return
        token0, logprobs = hand_off.token0, hand_off.token0_logprobs
        attempt.add_token(token0, logprobs)
        attempt.timing = Timing(transfer_s=hand_off.transfer_s, transfer_bytes=hand_off.num_bytes)
        self._thread.post_output(lambda: _without_tokens(self._engine.activate(attempt.sequence, token0, logprobs)))

    def on_hand_off_failed(self, hand_off: HandOff, reason: FailReason) -> None:
        """No READ is in flight any more. Compute the prompt here if allowed and token 0 is known, else give up."""
        attempt = self.attempts.get(hand_off.sequence.key)
        if attempt is None:
            return
        if not self._may_prefill or hand_off.token0 is None:
            self.fail(attempt, reason, retryable=True, detail="hand-off failed")
            return
        token0, logprobs = hand_off.token0, hand_off.token0_logprobs
        self._watch.local_prefill(attempt.sequence.num_prompt_tokens)
        attempt.add_token(token0, logprobs)
        self._thread.post_output(lambda: _without_tokens(self._engine.recompute(attempt.sequence, token0, logprobs)))

    # --- the engine's output

    def on_admitted(self, sequence: Sequence) -> None:
        """Nothing to tell: the gateway learns of a decode worker's work by its tokens."""

    def on_step(self, output: StepOutput) -> None:
        """Publish the step's tokens: one entry per gateway."""
        self._rates.note(output)
        self._watch.step(output)
        touched = self.attempts.absorb(output)
        self.attempts.publish(touched)
        for attempt in touched:
            if attempt.finished is not None:
                self._watch.job("finished")
                self.attempts.end(attempt, self._clock(), keeps_tokens=True)

    def on_step_failed(self, failure: StepFailure) -> None:
        """The step's sequences are lost here; the gateway decides where they go."""
        for sequence in failure.sequences:
            if (attempt := self.attempts.get(sequence.key)) is not None:
                self.fail(attempt, FailReason.STEP_FAILED, retryable=True, detail=failure.name, in_step=True)

    # --- ends

    def fail(
        self, attempt: Attempt, reason: FailReason, *, retryable: bool, detail: str = "", in_step: bool = False
    ) -> None:
        """The attempt ends here without finishing."""
        if self.attempts.get(attempt.key) is not attempt:
            return
        self._watch.job("failed")
        self.attempts.fail(attempt.key, attempt.gateway_id, reason, retryable=retryable, detail=detail, in_step=in_step)
        self._drop(attempt)

    def _drop(self, attempt: Attempt) -> None:
        self.attempts.end(attempt, self._clock(), keeps_tokens=False)
        if not self._hand_offs.abort(attempt.key):
            self._thread.post(lambda: self._engine.abort(attempt.sequence))

    # --- heartbeat, registration, drain

    def heartbeat(self, now_s: float) -> None:
        """Renew KV leases, enforce deadlines, drop what belongs to dead gateways."""
        self._hand_offs.heartbeat(now_s)
        for attempt in self.attempts.active():
            if now_s >= attempt.sequence.deadline_s:
                self.fail(attempt, FailReason.DEADLINE, retryable=False)
            elif self._is_gateway_gone(attempt.gateway_id):
                self._drop(attempt)
        self.attempts.prune(now_s)

    def load(self) -> WorkerLoad:
        """Numbers for the registration."""
        return self._watch.load(self._rates)

    def window(self, num_gateways: int) -> int:
        """KV blocks that each gateway may have outstanding here; none while one more sequence would slow all down."""
        if not self._engine.can_join_decode:
            return 0
        return max(1, self._watch.num_available_blocks() // num_gateways)

    @property
    def num_held(self) -> int:
        """Attempts that a drain waits for."""
        return len(self.attempts.active()) + self._hand_offs.num_open

    async def abandon(self, reason: FailReason) -> None:
        """Give everything up and tell everybody."""
        for attempt in self.attempts.active():
            self.fail(attempt, reason, retryable=True)
        await self._thread.call(lambda: None)

    async def reconnect(self) -> None:
        """New transports under the new generation: a fence for every READ of the old one."""
        await self._transports.reopen(*self._identity.peer)
        self._hand_offs.forget_all()


def _without_tokens(output: StepOutput | None) -> StepOutput | None:
    """Token 0 of a hand-off is in the attempt already; only what it ended is news."""
    return None if output is None else dataclasses.replace(output, tokens=[])
