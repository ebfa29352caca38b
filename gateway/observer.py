"""What the dispatcher tells to whoever counts: a protocol, so that dispatching knows no metrics library."""

from __future__ import annotations

from typing import Protocol


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
