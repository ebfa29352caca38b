"""What both roles ask of a job before they take it: is it new, does it supersede another, may it be taken at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.messages import DecodeJob, PrefillJob
from pdserve.worker.attempts import Attempt, Attempts
from pdserve.worker.jobs import refusal_of, sequence_of
from pdserve.worker.watch import WorkerWatch


@dataclass(frozen=True, slots=True)
class Admission:
    """The door of one worker.

    `drop` ends an attempt that a higher one of the same sequence supersedes.
    """

    attempts: Attempts
    watch: WorkerWatch
    drop: Callable[[Attempt], None]
    fingerprint: str
    vocab_size: int
    is_draining: Callable[[], bool]
    clock: Callable[[], float]

    def take(self, job: PrefillJob | DecodeJob, *, is_prefill_only: bool) -> Attempt | None:
        """Begin to hold the job's attempt; None: it is doubled or late, or was refused and the gateway told."""
        if not self.attempts.is_new(job.key):
            self.watch.late_message("stale")
            return None
        if (older := self.attempts.older_than(job.key)) is not None:
            self.drop(older)
        refusal = refusal_of(
            job, fingerprint=self.fingerprint, is_draining=self.is_draining(), vocab_size=self.vocab_size
        )
        if refusal is not None:
            self.watch.job("rejected")
            self.attempts.refuse(job.key, job.gateway_id, refusal)
            return None
        now_s = self.clock()
        return self.attempts.open(sequence_of(job, now_s, is_prefill_only=is_prefill_only), job.gateway_id, now_s)
