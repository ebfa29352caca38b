"""One attempt: which workers hold the sequence, and what is known of them. Data and small derived facts only."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.messages import AttemptKey, Finished
from pdserve.reasons import SequenceState
from pdserve.registration import WorkerRef


@dataclass(slots=True, eq=False)
class Assignment:
    """A job of an attempt at one worker."""

    worker: WorkerRef
    sent_s: float
    epoch: int
    """Which life of the bus the job was sent in."""
    state: SequenceState
    """The sequence's state there, as far as it is known."""
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

    def is_missed_again(self, now_s: float, since_s: float, grace_s: float) -> bool:
        """Count a roster without this attempt: whether it is the second one in a row.

        A roster that may be older than `since_s` does not count, and a doubled one not twice.
        """
        if now_s - since_s < grace_s or now_s - self.last_absence_s < grace_s / 2:
            return False
        self.num_absences += 1
        self.last_absence_s = now_s
        return self.num_absences >= 2


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
    """Finished as it was received, while tokens below its count are still missing."""
    finisher: Assignment | None = None
    """The assignment whose worker sent `finish`."""
    last_resend_s: float = float("-inf")

    def is_at(self, worker: WorkerRef) -> bool:
        """Whether this worker has a job of the attempt, given up or not."""
        return any(job is not None and job.worker == worker for job in (self.prefill, self.decode))

    @property
    def needs_prefill(self) -> bool:
        """Whether the attempt cannot go on without what the prefill worker holds, as far as the gateway can tell."""
        return self.prefill is not None and (self.token0_s is None or self.decode is None)

    def is_lease_over(self, now_s: float, kv_lease_s: float) -> bool:
        """Whether the prefill worker may have dropped the blocks, unless a decode worker renews their lease."""
        if self.token0_s is None:
            return False
        since_s = max(self.token0_s, self.decode_lost_s or self.token0_s)
        return now_s - since_s > 0.8 * kv_lease_s  # the gateway hears of it late: a margin
