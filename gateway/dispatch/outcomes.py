"""What a failed attempt means: is it a worker's fault, may the sequence go on, and what does the client hear.

Pure decisions over closed sets of reasons; sequence_machine.py and recovery.py apply them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import InvalidRequestError, RequestError, UnavailableError
from pdserve.messages import Failed
from pdserve.reasons import FailReason
from pdserve.settings import GatewaySettings

FREE_REASONS = frozenset({FailReason.NO_CAPACITY, FailReason.DRAINING})
"""Ends that are no fault: they do not count against MAX_ATTEMPTS."""

TRANSFER_REASONS = frozenset(
    {FailReason.HANDOFF_FAILED, FailReason.HANDOFF_TIMEOUT, FailReason.INTEGRITY, FailReason.NO_TOKEN0}
)
"""Ends of a hand-off that speak of the pair, not of the decode worker alone."""

MAX_RUNNING_DEATHS = 2
"""A sequence that was in the running step of two workers when they died is not given a third one to kill."""


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Bounds of the state machine. Seconds unless named otherwise."""

    max_attempts: int = GatewaySettings.max_attempts
    """Attempts that may end by a fault before the request fails."""
    max_decode_faults: int = 2
    """Decode workers that may fail one hand-off before its prefill worker is doubted too."""
    kv_lease_s: float = GatewaySettings.kv_lease_s
    progress_timeout_s: float = GatewaySettings.progress_timeout_s
    roster_grace_s: float = GatewaySettings.heartbeat_s
    """A heartbeat: a roster that arrives sooner after a job was sent may have been written before the job arrived."""
    resend_interval_s: float = 0.5
    """At most one ResendTokens per this time: the answer needs a round trip."""
    min_backoff_s: float = 0.02
    max_backoff_s: float = 1.0

    def backoff_s(self, num_retries: int) -> float:
        """Pause before the retry with this number (1 = the first): doubling, bounded."""
        return float(min(self.max_backoff_s, self.min_backoff_s * 2 ** min(num_retries - 1, 16)))


def error_of_failed(failed: Failed, num_prompt_tokens: int) -> RequestError:
    """What the client hears when a worker says that trying again is pointless."""
    if failed.reason == FailReason.TOO_LONG:
        return InvalidRequestError(
            f"The prompt of {num_prompt_tokens} tokens is longer than a worker of this model accepts; shorten it.",
            code="context_length_exceeded",
        )
    if failed.reason == FailReason.DEADLINE:
        return deadline_error()
    return RequestError(f"The request could not be computed ({failed.reason}).", code=failed.reason)


def deadline_error() -> RequestError:
    """The request's own deadline passed."""
    return RequestError(
        "The request did not finish before its deadline; ask for fewer tokens or a later deadline.",
        status=504,
        code="deadline_exceeded",
    )


def attempts_error(num_attempts: int, reason: FailReason) -> RequestError:
    """MAX_ATTEMPTS is used up."""
    return UnavailableError(
        f"The request failed on {num_attempts} attempts, the last one by {reason}; try again.",
        code="attempts_exhausted",
        retry_after_s=1.0,
    )


def running_deaths_error() -> RequestError:
    """The running step of two workers died with this sequence in it."""
    return RequestError(
        f"{MAX_RUNNING_DEATHS} workers died while they were computing this request; it is not tried again.",
        code="worker_died",
    )
