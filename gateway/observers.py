"""What the dispatcher and the HTTP layer tell their observers: protocols, so that neither knows a metrics library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdserve.gateway.generation.waterfall import Waterfall


class DispatchObserver(Protocol):
    """Hooks; each must return at once and never raise."""

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        """A request came through the door; so many of its prompt tokens are probably cached somewhere."""

    def shed(self, reason: str) -> None:
        """A request was refused: too_long, draining, bus, no_workers, queue_requests, queue_tokens, stream_full,
        deadline.
        """

    def cancelled(self, reason: str) -> None:
        """A request was cancelled: client, slow_client, deadline, shutdown."""

    def redispatched(self, phase: str, reason: str) -> None:
        """A sequence goes back to the queue from prefill, handoff or decode (outcomes.REASONS)."""

    def dropped_tokens(self, num_tokens: int) -> None:
        """Tokens came again and were dropped."""

    def diverged(self) -> None:
        """An index came again with another token."""

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        """Current sizes; `held` are the queued ones for which there is no pair of workers."""


class SilentObserver:
    """Counts nothing."""

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        """Nothing."""

    def shed(self, reason: str) -> None:
        """Nothing."""

    def cancelled(self, reason: str) -> None:
        """Nothing."""

    def redispatched(self, phase: str, reason: str) -> None:
        """Nothing."""

    def dropped_tokens(self, num_tokens: int) -> None:
        """Nothing."""

    def diverged(self) -> None:
        """Nothing."""

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        """Nothing."""


@dataclass(slots=True)
class RequestRecord:
    """One request, as told when it ends."""

    code: int = 500
    """HTTP status sent; 499 when the client left before any was sent."""
    finish_reason: str = "error"
    """stop | length | cancelled | error."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    duration_s: float = 0.0
    waterfall: Waterfall | None = None
    """Of the first prompt; None when nothing was dispatched."""
    token_waits_s: list[float] = field(default_factory=list)
    """Mean time per output token after the first one, for each choice with at least two."""


class RequestObserver(Protocol):
    """Hooks; each must return at once and never raise."""

    def tokenized(self, duration_s: float) -> None:
        """A prompt was rendered and encoded."""

    def offered(self, num_prompt_tokens: int) -> None:
        """A request came to the door, before any queue."""

    def tokens_came(self, gap_s: float | None, num_tokens: int) -> None:
        """Tokens of one choice came together, `gap_s` after those before; None: the first ones."""

    def ended(self, record: RequestRecord) -> None:
        """A generation request ended, however it did."""


class SilentRequestObserver:
    """Counts nothing."""

    def tokenized(self, duration_s: float) -> None:
        """Nothing."""

    def offered(self, num_prompt_tokens: int) -> None:
        """Nothing."""

    def tokens_came(self, gap_s: float | None, num_tokens: int) -> None:
        """Nothing."""

    def ended(self, record: RequestRecord) -> None:
        """Nothing."""
