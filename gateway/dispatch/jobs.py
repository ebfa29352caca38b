"""What never changes about a sequence, and the jobs made of it: original prompt plus every token emitted so far."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.ids import Fingerprint, GatewayId, RequestId
from pdserve.messages import AttemptKey, DecodeJob, PrefillJob, SequenceKey
from pdserve.reasons import FinishReason
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One choice of a request, as it came through the door."""

    request_id: RequestId
    choice: int
    gateway_id: GatewayId
    fingerprint: Fingerprint
    prompt_token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float
    """The gateway's monotonic clock."""
    priority: int = 0
    cache_salt: str = ""
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def key(self) -> SequenceKey:
        """Identity within the gateway."""
        return SequenceKey(self.request_id, self.choice)

    def prefill_job(self, key: AttemptKey, output: list[int], now_s: float) -> PrefillJob:
        """Compute everything up to the next token."""
        return PrefillJob(
            request_id=key.request_id,
            choice=key.choice,
            attempt=key.attempt,
            nonce=key.nonce,
            gateway_id=self.gateway_id,
            fingerprint=self.fingerprint,
            prompt_token_ids=self.prompt_token_ids + output,
            num_original_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.sampling,
            remaining_s=self.deadline_s - now_s,
            priority=self.priority,
            cache_salt=self.cache_salt,
            will_decode=self.num_left(output) > 1,
        )

    def decode_job(self, key: AttemptKey, output: list[int], prefill: WorkerRef | None, now_s: float) -> DecodeJob:
        """Go on from what `prefill` computes; without it, compute the prompt too."""
        return DecodeJob(
            request_id=key.request_id,
            choice=key.choice,
            attempt=key.attempt,
            nonce=key.nonce,
            gateway_id=self.gateway_id,
            fingerprint=self.fingerprint,
            prompt_token_ids=self.prompt_token_ids + output,
            num_original_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.sampling,
            remaining_s=self.deadline_s - now_s,
            priority=self.priority,
            cache_salt=self.cache_salt,
            prefill_worker_id=prefill.worker_id if prefill else None,
            prefill_generation=prefill.generation if prefill else None,
        )

    def num_left(self, output: list[int]) -> int:
        """Output tokens that may still come."""
        return self.sampling.max_tokens - len(output)

    def natural_end(self, output: list[int]) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop token) when these tokens are already a whole answer.

        Needed only when a worker's Finished was lost together with the worker: computing on would add tokens
        behind the end.
        """
        last = output[-1] if output else None
        is_eos = last in self.eos_token_ids and not self.sampling.ignore_eos
        if last is not None and (is_eos or last in self.sampling.stop_token_ids):
            return FinishReason.STOP, last
        return (FinishReason.LENGTH, None) if self.num_left(output) <= 0 else None
