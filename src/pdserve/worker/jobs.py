"""From a job on the bus to a sequence of the engine: what both roles check and build alike."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.sequence import Sequence
from pdserve.messages import DecodeJob, PrefillJob
from pdserve.reasons import FailReason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job is not taken; goes into Failed."""

    reason: FailReason
    detail: str
    retryable: bool = True


def refusal_of(job: PrefillJob | DecodeJob, *, fingerprint: str, is_draining: bool, vocab_size: int) -> Refusal | None:
    """Why this worker must not take this job, or None."""
    if is_draining:
        return Refusal(FailReason.DRAINING, "this worker is draining")
    if job.fingerprint != fingerprint:
        return Refusal(FailReason.FINGERPRINT, f"job is for model {job.fingerprint}, this worker serves {fingerprint}")
    if job.remaining_s <= 0:
        return Refusal(FailReason.DEADLINE, "the deadline had passed on arrival", retryable=False)
    if not job.prompt_token_ids or not 0 < job.num_original_prompt_tokens <= len(job.prompt_token_ids):
        return Refusal(FailReason.SCHEMA, "prompt is empty or its border lies outside", retryable=False)
    if min(job.prompt_token_ids) < 0 or max(job.prompt_token_ids) >= vocab_size:
        return Refusal(FailReason.SCHEMA, f"token ids must lie in [0, {vocab_size})", retryable=False)
    return None


def sequence_of(job: PrefillJob | DecodeJob, now_s: float, *, is_prefill_only: bool) -> Sequence:
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
        is_prefill_only=is_prefill_only,
    )
