"""Step 4 of 8: the prefill worker computes prompts, publishes token 0 and offers the blocks to a decode worker.

A PrefillJob comes from the gateway; the engine reserves all blocks of the prompt and computes it in chunks; token 0
goes to the gateway at once. Before: step 3, gateway/dispatch/dispatcher.py. After: step 5, prefill_worker/offers.py.
It never decodes beyond token 0 and never writes another process's memory. What both roles do is in
worker/role_worker.py.
"""

from __future__ import annotations

from pdserve.engine.engine import StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.messages import AnyMessage, AttemptKey, KvRelease, KvWant, LeaseRenewal, PrefillJob, Timing
from pdserve.prefill_worker.offers import Offers
from pdserve.reasons import KvFailReason
from pdserve.registration import Role
from pdserve.worker.attempts import Attempt
from pdserve.worker.role_worker import RoleWorker


class PrefillPart:
    """What only a prefill worker does; every method runs on the event loop.

    Args:
        worker: the worker that this is a part of.
        offers: the prefill side of all hand-offs.
        window_tokens: prompt tokens that all gateways together may have outstanding here: about two steps.
    """

    role = Role.PREFILL

    def __init__(self, worker: RoleWorker, offers: Offers, *, window_tokens: int) -> None:
        self._worker = worker
        self._offers = offers
        self._window_tokens = window_tokens
        offers.report_to(self._on_lease_over)

    def handle(self, message: AnyMessage) -> None:
        """Take a job, or what a decode worker says about a hand-off."""
        match message:
            case PrefillJob():
                self._begin(message)
            case KvWant():
                self._offers.want(message, is_buried=self._worker.attempts.is_buried(message.key))
            case KvRelease():
                self._offers.release(message)
            case LeaseRenewal():
                self._offers.renew(message)
            case _:
                self._worker.watch.late_message("unknown")

    def _begin(self, job: PrefillJob) -> None:
        attempt = self._worker.admit(job)
        if attempt is None:
            return
        if job.will_decode:
            self._offers.open(attempt.sequence)
        self._worker.compute(attempt)

    # --- the engine's output

    def on_admitted(self, attempt: Attempt) -> None:
        """Tell the gateway that all blocks are reserved: it may choose a decode worker."""
        self._worker.attempts.start(attempt)

    def on_tokens(self, attempts: list[Attempt]) -> None:
        """Add to each token 0 how long it took; a prompt that ends with it needs no decode worker."""
        now_s = self._worker.clock()
        for attempt in attempts:
            prefill_s = _prefill_s(attempt.sequence, now_s)
            attempt.timing = Timing(schedule_s=attempt.schedule_s, prefill_s=prefill_s)
            if attempt.finished is not None:
                self._offers.close(attempt.key)

    def on_step(self, output: StepOutput) -> None:
        """Offer the blocks that the step completed."""
        for sequence in output.progressed:
            if (attempt := self._worker.attempts.get(sequence.key)) is not None:
                self._offers.progress(sequence, *attempt.first_token)

    # --- ends

    def _on_lease_over(self, key: AttemptKey) -> None:
        """End an attempt whose blocks a decode worker has, or none came for: it is over here."""
        if (attempt := self._worker.attempts.get(key)) is not None:
            self._worker.finish(attempt)

    def release(self, attempt: Attempt, *, has_failed: bool) -> None:
        """Stop computing. Blocks that a decode worker may be reading stay leased."""
        self._worker.engine_thread.post(lambda engine: engine.abort(attempt.sequence))
        self._offers.end(attempt.key, KvFailReason.PREFILL_FAILED if has_failed else None)

    # --- heartbeat, registration, drain

    def heartbeat(self, now_s: float) -> None:
        """End the leases whose time is over."""
        self._offers.expire()

    def window(self, num_gateways: int) -> int:
        """Prompt tokens that each gateway may have outstanding here."""
        return max(1, self._window_tokens // num_gateways)

    @property
    def num_held(self) -> int:
        """Attempts and leases that a drain waits for."""
        return max(len(self._worker.attempts.active()), self._offers.num_leases)

    def forget_all(self) -> None:
        """End every offer and lease: nothing reads these blocks any more."""
        self._offers.close_all()


def _prefill_s(sequence: Sequence, now_s: float) -> float:
    return 0.0 if sequence.admitted_s is None else max(0.0, now_s - sequence.admitted_s)
