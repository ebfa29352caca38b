"""One attempt: which workers hold the sequence, and what is known of them. Data and small derived facts only."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.ids import GatewayId
from pdserve.messages import AttemptKey, Cancel, Finished, ResendTokens
from pdserve.reasons import CancelReason
from pdserve.registration import WorkerRef


@dataclass(slots=True, eq=False)
class Assignment:
    """A job at a worker."""

    worker: WorkerRef
    sent_s: float
    epoch: int
    """Which life of the bus the job was sent in."""
    state: str
    """The sequence's state there, as far as known: waiting | running | leased | receiving | preempted | finished."""
    num_sends: int = 1
    is_seen: bool = False
    """The worker has spoken of this attempt."""
    has_tokens: bool = False
    """The worker has sent tokens of this attempt."""
    is_gone: bool = False
    """The worker died, or has given the attempt up."""
    num_absences: int = 0
    """Consecutive rosters without this attempt."""
    last_absence_s: float = float("-inf")


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch of a sequence. Without a prefill assignment the decode worker computes the prompt itself."""

    key: AttemptKey
    first_index: int
    """Output index of this attempt's first token."""
    will_decode: bool
    """False: one output token is left, so a prefill worker does it all."""
    last_progress_s: float
    prefill: Assignment | None = None
    decode: Assignment | None = None
    is_started: bool = False
    """The prefill worker has reserved the prompt's blocks and computes."""
    token0_s: float | None = None
    decode_lost_s: float | None = None
    """When the last decode worker was lost; the lease runs on from about there."""
    num_decode_faults: int = 0
    refused: set[WorkerRef] = field(default_factory=set)
    """Decode workers that had this attempt: they keep a tombstone and must not be asked for it again."""
    finish: Finished | None = None
    """Received, but tokens below its count are still missing."""
    finisher: Assignment | None = None
    """Who sent `finish`."""
    last_resend_s: float = float("-inf")

    @property
    def wants_decode(self) -> bool:
        """Whether a decode worker is to be chosen now."""
        return (
            self.prefill is not None
            and self.is_started
            and self.will_decode
            and self.decode is None
            and self.finish is None
        )

    @property
    def needs_prefill(self) -> bool:
        """Whether the attempt cannot go on without what the prefill worker holds, as far as the gateway can tell."""
        return self.prefill is not None and (self.token0_s is None or self.decode is None)

    def holder(self, worker: WorkerRef) -> Assignment | None:
        """The current assignment of this worker."""
        for assignment in (self.decode, self.prefill):
            if assignment is not None and assignment.worker == worker:
                return assignment
        return None

    def holders(self) -> list[Assignment]:
        """Workers that may hold the attempt. A prefill worker is done once the decode worker sends tokens."""
        decode_has_kv = self.decode is not None and self.decode.has_tokens
        candidates = [None if decode_has_kv else self.prefill, self.decode]
        return [holder for holder in candidates if holder is not None and not holder.is_gone]

    def is_lease_over(self, now_s: float, kv_lease_s: float) -> bool:
        """Whether P may have dropped the blocks because no decode worker renews their lease (with a margin)."""
        if self.token0_s is None:
            return False
        since_s = max(self.token0_s, self.decode_lost_s or self.token0_s)
        return now_s - since_s > 0.8 * kv_lease_s

    def cancel_message(self, reason: CancelReason) -> Cancel:
        """Tells a holder to stop."""
        key = self.key
        return Cancel(request_id=key.request_id, choice=key.choice, attempt=key.attempt, nonce=key.nonce, reason=reason)

    def resend_message(self, gateway_id: GatewayId, from_index: int) -> ResendTokens:
        """Asks a holder for tokens again."""
        key = self.key
        return ResendTokens(
            request_id=key.request_id,
            choice=key.choice,
            attempt=key.attempt,
            nonce=key.nonce,
            gateway_id=gateway_id,
            from_index=from_index,
        )
