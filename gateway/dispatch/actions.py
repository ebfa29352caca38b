"""What a sequence's state machine asks of its surroundings: plain data, performed in order by exchange.py."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import RequestError
from pdserve.gateway.generation.request import FinishedEvent, TokensEvent
from pdserve.messages import Message, TokenLogprobs
from pdserve.reasons import FailReason, Phase
from pdserve.registration import WorkerRef


@dataclass(frozen=True, slots=True)
class Send:
    """Put this message into the worker's inbox."""

    worker: WorkerRef
    message: Message


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand this event to the client."""

    event: TokensEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class Score:
    """Hand the client log-probabilities of the prompt's next tokens."""

    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class WantDecode:
    """The hand-off needs a decode worker: choose one and call `assign_decode`."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """The attempt is over; the sequence waits for another pair, ahead of new requests."""

    phase: Phase
    """Where the attempt was: in prefill, hand-off or decode."""
    reason: FailReason
    not_before_s: float


@dataclass(frozen=True, slots=True)
class Avoid:
    """Prefer others over this worker for a while; with `peer`, only for hand-offs from that prefill worker."""

    worker: WorkerRef
    peer: WorkerRef | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Tokens that had been seen before were dropped."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """An index came again with a different token."""

    index: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The sequence, and with it its request, ends with this error."""

    error: RequestError


Action = Send | Emit | Score | WantDecode | Requeue | Avoid | Dropped | Diverged | Fail
