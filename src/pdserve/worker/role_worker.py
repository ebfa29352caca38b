"""What prefill and decode workers do alike with attempts: take, cancel, publish, fail, time out, give up.

The process around it is `worker/host.py`; what a role does with prompts and hand-offs is its own part
(`prefill_worker/worker.py`, `decode_worker/worker.py`). Everything runs on the event loop and returns fast; the
engine is reached through its thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pdserve.engine.engine import StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.errors import InvalidRequestError
from pdserve.ids import GatewayId
from pdserve.messages import AnyMessage, Cancel, ResendTokens
from pdserve.reasons import FailReason
from pdserve.registration import Role, WorkerLoad
from pdserve.worker.admission import Admission, Job, sequence_of
from pdserve.worker.attempts import Attempt, Attempts
from pdserve.worker.engine_thread import EngineThread, StepFailure
from pdserve.worker.rates import StepRates
from pdserve.worker.tasks import TaskSet
from pdserve.worker.watch import WorkerWatch

_TOMBSTONE_S = 300.0
"""How long a Cancel that overtook its job is remembered (its deadline is unknown)."""


class RolePart(Protocol):
    """What a role adds to the worker that it belongs to."""

    role: Role

    def handle(self, message: AnyMessage) -> None:
        """Take one message that is not for every role; it may be unknown, doubled or late."""
        ...

    def on_admitted(self, attempt: Attempt) -> None:
        """Hear that the scheduler took an attempt for the first time."""
        ...

    def on_tokens(self, attempts: list[Attempt]) -> None:
        """Add to attempts that have new tokens or a finish; they are published next."""
        ...

    def on_step(self, output: StepOutput) -> None:
        """Go on with what a step completed; its tokens are published."""
        ...

    def release(self, attempt: Attempt, *, has_failed: bool) -> None:
        """Free what an attempt holds that ends without finishing, its sequence in the engine included."""
        ...

    def heartbeat(self, now_s: float) -> None:
        """Keep leases alive, or end them, once per heartbeat."""
        ...

    def window(self, num_gateways: int) -> int:
        """What each gateway may have outstanding here: prompt tokens (prefill) or KV blocks (decode)."""
        ...

    @property
    def num_held(self) -> int:
        """Attempts and hand-offs that a drain waits for."""
        ...

    def forget_all(self) -> None:
        """Drop every hand-off: the transports were torn down, and no READ is active any more."""
        ...


class RoleWorker:
    """One worker: its attempts, and its role's part.

    Args:
        engine_thread: runs the engine.
        attempts: what is held for gateways, and the way to tell them.
        admission: says which jobs are refused.
        watch: notes what happens as metrics.
        make_part: makes the role's part, which calls this worker back.
        prefill_timeout_s: longest time from a prompt's admission to its end.
        is_gateway_gone: whether a gateway is known to be gone, by its id.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        attempts: Attempts,
        admission: Admission,
        watch: WorkerWatch,
        make_part: Callable[[RoleWorker], RolePart],
        *,
        prefill_timeout_s: float,
        is_gateway_gone: Callable[[GatewayId], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_thread = engine_thread
        self.attempts = attempts
        self.watch = watch
        self.clock = clock
        self._admission = admission
        self._prefill_timeout_s = prefill_timeout_s
        self._is_gateway_gone = is_gateway_gone
        self._rates = StepRates()
        self._tasks = TaskSet()
        self._part = make_part(self)

    # --- messages

    def handle(self, message: AnyMessage) -> None:
        """Take one message from the inbox."""
        match message:
            case Cancel():
                self._cancel(message)
            case ResendTokens():
                self.attempts.resend(message)
            case _:
                self._part.handle(message)

    def admit(self, job: Job) -> Attempt | None:
        """Begin to hold the job's attempt; None: it is doubled or late, or was refused and the gateway told."""
        if not self.attempts.is_new(job.key):
            self.watch.late_message("stale")
            return None
        if (older := self.attempts.older_than(job.key)) is not None:
            self._drop(older)
        if (refusal := self._admission.refusal_of(job)) is not None:
            self.watch.job("rejected")
            self.attempts.refuse(job.key, job.gateway_id, refusal)
            return None
        now_s = self.clock()
        return self.attempts.open(sequence_of(job, now_s), job.gateway_id, now_s)

    def compute(self, attempt: Attempt) -> None:
        """Queue an attempt whose prompt is computed here."""
        self._tasks.spawn(self._compute(attempt))

    async def _compute(self, attempt: Attempt) -> None:
        if not self.holds(attempt):
            return
        try:
            await self.engine_thread.call(lambda engine: engine.add(attempt.sequence))
        except InvalidRequestError as error:
            self.fail(attempt, FailReason.TOO_LONG, retryable=False, detail=error.message)
        else:
            self.watch.job("accepted")

    def _cancel(self, message: Cancel) -> None:
        attempt = self.attempts.get(message.key)
        if attempt is None:
            self.attempts.bury(message.key, self.clock() + _TOMBSTONE_S)
            return
        self.watch.job("cancelled")
        self._drop(attempt)

    # --- the engine's output

    def on_admitted(self, sequence: Sequence) -> None:
        """Tell the role's part of an attempt whose computation begins."""
        if (attempt := self.attempts.get(sequence.key)) is not None:
            self._part.on_admitted(attempt)

    def on_step(self, output: StepOutput) -> None:
        """Publish the step's tokens, one entry per gateway; then let the role go on."""
        self._rates.note(output)
        self.watch.step(output)
        touched = self.attempts.absorb(output)
        self._part.on_tokens(touched)
        self.attempts.publish(touched)
        for attempt in touched:
            if attempt.finished is not None:
                self.finish(attempt)
        self._part.on_step(output)

    def on_step_failed(self, failure: StepFailure) -> None:
        """Fail the step's attempts; the gateway decides where they go."""
        for sequence in failure.sequences:
            if (attempt := self.attempts.get(sequence.key)) is not None:
                self.fail(attempt, FailReason.STEP_FAILED, retryable=True, detail=failure.name, in_step=True)

    # --- ends

    def holds(self, attempt: Attempt) -> bool:
        """Whether this attempt is still active here."""
        return self.attempts.get(attempt.key) is attempt

    def finish(self, attempt: Attempt) -> None:
        """End an attempt that did all it had to do here; its tokens can be asked for again."""
        self.watch.job("finished")
        self.attempts.end(attempt, self.clock(), keeps_tokens=True)

    def fail(
        self, attempt: Attempt, reason: FailReason, *, retryable: bool, detail: str = "", in_step: bool = False
    ) -> None:
        """End an attempt that did not finish, and tell its gateway; nothing if it is over already."""
        if not self.holds(attempt):
            return
        self.watch.job("failed")
        self.attempts.fail(attempt.key, attempt.gateway_id, reason, retryable=retryable, detail=detail, in_step=in_step)
        self._drop(attempt, has_failed=True)

    def _drop(self, attempt: Attempt, *, has_failed: bool = False) -> None:
        self.attempts.end(attempt, self.clock(), keeps_tokens=False)
        self._part.release(attempt, has_failed=has_failed)

    # --- heartbeat, registration, drain

    @property
    def role(self) -> Role:
        """The role of this worker's part."""
        return self._part.role

    def heartbeat(self, now_s: float) -> None:
        """Send what was held back, look after leases, enforce deadlines, drop what belongs to dead gateways."""
        self.attempts.publish_held_back()
        self._part.heartbeat(now_s)
        for attempt in self.attempts.active():
            self._check(attempt, now_s)
        self.attempts.prune(now_s)

    def _check(self, attempt: Attempt, now_s: float) -> None:
        sequence = attempt.sequence
        if now_s >= sequence.deadline_s:
            self.fail(attempt, FailReason.DEADLINE, retryable=False)
        elif self._is_gateway_gone(attempt.gateway_id):
            self._drop(attempt)
        elif attempt.is_computing_prompt and now_s - (sequence.admitted_s or 0.0) > self._prefill_timeout_s:
            self.fail(attempt, FailReason.PREFILL_TIMEOUT, retryable=True)

    def load(self) -> WorkerLoad:
        """Numbers for the registration."""
        return self.watch.load(self._rates)

    def window(self, num_gateways: int) -> int:
        """What each of so many gateways may have outstanding here."""
        return self._part.window(num_gateways)

    @property
    def num_held(self) -> int:
        """Attempts and hand-offs that a drain waits for."""
        return self._part.num_held

    @property
    def is_draining(self) -> bool:
        """Whether new jobs are refused because this worker leaves."""
        return self._admission.is_draining

    def take_no_more(self) -> None:
        """Refuse all jobs from now on: this worker leaves."""
        self._admission.is_draining = True

    async def abandon(self, reason: FailReason) -> None:
        """Fail every attempt, and wait until the engine let go of them."""
        for attempt in self.attempts.active():
            self.fail(attempt, reason, retryable=True)
        await self.engine_thread.call(lambda engine: None)

    async def forget_hand_offs(self) -> None:
        """Drop every hand-off and wait for the engine. The transports were torn down, so no READ is active any more."""
        self._part.forget_all()
        await self.engine_thread.call(lambda engine: None)
