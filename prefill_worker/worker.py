"""The prefill policy: compute prompts, publish token 0, offer the blocks to a decode worker.

One request's way, steps 1, 2 and 7 (docs/architecture.md): a PrefillJob comes from the gateway's dispatcher;
the engine reserves all blocks of the prompt and computes it in chunks; token 0 goes to the gateway at once.
Before: gateway/dispatch/dispatcher.py. Beside: prefill_worker/offers.py (4, 5, 8). After: decode_worker/worker.py.
It never decodes beyond token 0 and never writes anybody else's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bus.bus import Bus
from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.errors import InvalidRequestError
from pdserve.messages import (
    AnyMessage,
    AttemptKey,
    Cancel,
    KvRelease,
    KvWant,
    LeaseRenewal,
    PrefillJob,
    ResendTokens,
    Started,
    Timing,
)
from pdserve.prefill_worker.offers import Offers
from pdserve.reasons import FailReason, KvFailReason
from pdserve.registration import Role, WorkerLoad
from pdserve.worker.admission import Admission
from pdserve.worker.attempts import Attempt, Attempts
from pdserve.worker.engine_thread import EngineThread, StepFailure
from pdserve.worker.identity import Identity
from pdserve.worker.rates import StepRates
from pdserve.worker.tasks import TaskSet
from pdserve.worker.transports import WorkerTransports
from pdserve.worker.watch import WorkerWatch


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds of the prefill policy."""

    prefill_timeout_s: float
    """From admission to token 0 at most."""
    window_tokens: int
    """Prompt tokens that all gateways together may have outstanding here: about two steps."""


class PrefillWorker:
    """Policy of role prefill; every method runs on the event loop."""

    role = Role.PREFILL

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        engine_thread: EngineThread,
        transports: WorkerTransports,
        bus: Bus,
        attempts: Attempts,
        offers: Offers,
        limits: PrefillLimits,
        watch: WorkerWatch,
        *,
        fingerprint: str,
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
        self._offers = offers
        offers.report_to(self.on_lease_over)
        self._limits = limits
        self._watch = watch
        self._is_gateway_gone = is_gateway_gone
        self._clock = clock
        self._rates = StepRates()
        self._tasks = TaskSet()
        self._admission = Admission(attempts, watch, self._drop, fingerprint, engine.vocab_size, is_draining, clock)

    # --- messages

    def handle(self, message: AnyMessage) -> None:
        """One message from the inbox."""
        match message:
            case PrefillJob():
                self._admit(message)
            case Cancel():
                self._cancel(message)
            case ResendTokens():
                self.attempts.resend(message)
            case KvWant():
                self._offers.want(message, is_buried=self.attempts.is_buried(message.key))
            case KvRelease():
                self._offers.release(message)
            case LeaseRenewal():
                self._offers.renew(message)
            case _:
                self._watch.late_message("unknown")

    def _admit(self, job: PrefillJob) -> None:
        attempt = self._admission.take(job, is_prefill_only=True)
        if attempt is None:
            return
        if job.will_decode:
            self._offers.open(attempt.sequence, self._engine.chain_hashes(attempt.sequence))
        self._tasks.spawn(self._add(attempt))

    async def _add(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.key) is not attempt:
            return
        try:
            await self._thread.call(lambda: self._engine.add(attempt.sequence))
        except InvalidRequestError as error:
            self._fail(attempt, FailReason.TOO_LONG, retryable=False, detail=error.message)
        else:
            self._watch.job("accepted")

    def _cancel(self, message: Cancel) -> None:
        attempt = self.attempts.get(message.key)
        if attempt is None:
            self.attempts.bury(message.key, self._clock() + self._limits.prefill_timeout_s)
            return
        self._watch.job("cancelled")
        self._drop(attempt)

    # --- the engine's output

    def on_admitted(self, sequence: Sequence) -> None:
        """The engine begins with a prompt, all its blocks reserved: the gateway may choose a decode worker."""
        attempt = self.attempts.get(sequence.key)
        if attempt is None:
            return
        worker_id, generation = self._identity.peer
        started = Started(
            **sequence.key._asdict(),
            worker_id=worker_id,
            generation=generation,
            num_cached_tokens=sequence.num_cached_tokens,
            schedule_s=_schedule_s(sequence),
        )
        self._bus.send(self._bus.keys.tokens(attempt.gateway_id), started)

    def on_step(self, output: StepOutput) -> None:
        """Publish token 0 of every finished prompt, then offer what the step completed."""
        self._rates.note(output)
        self._watch.step(output)
        now_s = self._clock()
        for sequence, _, _ in output.tokens:
            if (attempt := self.attempts.get(sequence.key)) is not None:
                attempt.timing = Timing(schedule_s=_schedule_s(sequence), prefill_s=_prefill_s(sequence, now_s))
        touched = self.attempts.absorb(output)
        self.attempts.publish(touched)
        for attempt in touched:
            if attempt.finished is not None:
                self._watch.job("finished")
                self._offers.close(attempt.key)
                self.attempts.end(attempt, now_s, keeps_tokens=True)
        for sequence in output.progressed:
            if (attempt := self.attempts.get(sequence.key)) is not None:
                self._offers.progress(sequence, *attempt.first_token)

    def on_step_failed(self, failure: StepFailure) -> None:
        """The step's prompts are lost here; the gateway decides where they go."""
        for sequence in failure.sequences:
            if (attempt := self.attempts.get(sequence.key)) is not None:
                self._fail(attempt, FailReason.STEP_FAILED, retryable=True, detail=failure.name, in_step=True)

    # --- ends

    def on_lease_over(self, key: AttemptKey) -> None:
        """A decode worker has everything (or nobody came for it): this attempt is over here."""
        if (attempt := self.attempts.get(key)) is not None:
            self._watch.job("finished")
            self.attempts.end(attempt, self._clock(), keeps_tokens=True)

    def _fail(
        self, attempt: Attempt, reason: FailReason, *, retryable: bool, detail: str = "", in_step: bool = False
    ) -> None:
        if self.attempts.get(attempt.key) is not attempt:
            return
        self._watch.job("failed")
        self.attempts.fail(attempt.key, attempt.gateway_id, reason, retryable=retryable, detail=detail, in_step=in_step)
        self._drop(attempt, failure=KvFailReason.PREFILL_FAILED)

    def _drop(self, attempt: Attempt, failure: KvFailReason | None = None) -> None:
        self.attempts.end(attempt, self._clock(), keeps_tokens=False)
        self._thread.post(lambda: self._engine.abort(attempt.sequence))
        self._offers.end(attempt.key, failure)

    # --- heartbeat, registration, drain

    def heartbeat(self, now_s: float) -> None:
        """Expire leases, enforce deadlines, drop what belongs to dead gateways."""
        self._offers.expire()
        for attempt in self.attempts.active():
            self._check(attempt, now_s)
        self.attempts.prune(now_s)

    def _check(self, attempt: Attempt, now_s: float) -> None:
        sequence = attempt.sequence
        is_computing = sequence.admitted_s is not None and not attempt.token_ids
        if now_s >= sequence.deadline_s:
            self._fail(attempt, FailReason.DEADLINE, retryable=False)
        elif self._is_gateway_gone(attempt.gateway_id):
            self._drop(attempt)
        elif is_computing and now_s - sequence.admitted_s > self._limits.prefill_timeout_s:  # type: ignore[operator]
            self._fail(attempt, FailReason.PREFILL_TIMEOUT, retryable=True)

    def load(self) -> WorkerLoad:
        """Numbers for the registration."""
        return self._watch.load(self._rates)

    def window(self, num_gateways: int) -> int:
        """Prompt tokens that each gateway may have outstanding here."""
        return max(1, self._limits.window_tokens // num_gateways)

    @property
    def num_held(self) -> int:
        """Attempts and leases that a drain waits for."""
        return max(len(self.attempts.active()), self._offers.num_leases)

    async def abandon(self, reason: FailReason) -> None:
        """Give everything up and tell everybody."""
        for attempt in self.attempts.active():
            self._fail(attempt, reason, retryable=True)
        self._offers.close_all()
        await self._thread.call(lambda: None)

    async def reconnect(self) -> None:
        """New transports under the new generation."""
        await self._transports.reopen(*self._identity.peer)


def _schedule_s(sequence: Sequence) -> float:
    return 0.0 if sequence.admitted_s is None else max(0.0, sequence.admitted_s - sequence.arrival_s)


def _prefill_s(sequence: Sequence, now_s: float) -> float:
    return 0.0 if sequence.admitted_s is None else max(0.0, now_s - sequence.admitted_s)
