"""What a job must satisfy before a worker takes it, and the sequence that it becomes.

Pure. Whether there is room for the sequence now is the engine's question, and not asked here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.sequence import Sequence
from pdserve.ids import Fingerprint
from pdserve.messages import DecodeJob, PrefillJob
from pdserve.reasons import FailReason

Job = PrefillJob | DecodeJob


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job is not taken; goes into Failed."""

    reason: FailReason
    detail: str
    retryable: bool = True


@dataclass(slots=True)
class Admission:
    """The conditions of one worker."""

    fingerprint: Fingerprint
    """Model fingerprint; jobs for another model are refused."""
    vocab_size: int
    """Token ids lie in [0, vocab_size)."""
    is_draining: bool = False
    """Set once, when the worker begins to leave: it takes nothing new."""

    def refusal_of(self, job: Job) -> Refusal | None:
        """Why this worker must not take this job, or None."""
        if self.is_draining:
            return Refusal(FailReason.DRAINING, "this worker is draining")
        if job.fingerprint != self.fingerprint:
            detail = f"job is for model {job.fingerprint}, this worker serves {self.fingerprint}"
            return Refusal(FailReason.FINGERPRINT, detail)
        if job.remaining_s <= 0:
            return Refusal(FailReason.DEADLINE, "the deadline had passed on arrival", retryable=False)
        if not job.prompt_token_ids or not 0 < job.num_original_prompt_tokens <= len(job.prompt_token_ids):
            return Refusal(FailReason.SCHEMA, "prompt is empty or its border lies outside", retryable=False)
        if min(job.prompt_token_ids) < 0 or max(job.prompt_token_ids) >= self.vocab_size:
            return Refusal(FailReason.SCHEMA, f"token ids must lie in [0, {self.vocab_size})", retryable=False)
        return None


def sequence_of(job: Job, now_s: float) -> Sequence:
    """The engine's sequence for a job; its deadline is on the local monotonic clock."""
    return Sequence(
        key=job.key,
        prompt_token_ids=job.prompt_token_ids,
        num_original_prompt_tokens=job.num_original_prompt_tokens,
        sampling=job.sampling,
        priority=job.priority,
        cache_salt=job.cache_salt,
        arrival_s=now_s,
        deadline_s=now_s + job.remaining_s,
        is_prefill_only=isinstance(job, PrefillJob),
    )
