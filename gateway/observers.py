"""What the dispatcher and the HTTP layer tell their observers: protocols, so that neither knows a metrics library.

Every hook must return at once and never raise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdserve.gateway.generation.waterfall import Waterfall
from pdserve.reasons import CancelReason, Ending, FailReason, Phase, RefusalReason


class DispatchObserver(Protocol):
    """What the dispatcher tells."""

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        """A request was let in; so many of its prompt tokens are probably cached somewhere."""

    def shed(self, reason: RefusalReason) -> None:
        """A request was refused that may be asked again: any reason but TOO_LONG."""

    def cancelled(self, reason: CancelReason) -> None:
        """A request was cancelled by client, slow client, deadline or shutdown."""

    def redispatched(self, phase: Phase, reason: FailReason) -> None:
        """A sequence goes back to the queue from prefill, hand-off or decode."""

    def dropped_tokens(self, num_tokens: int) -> None:
        """Tokens came again and were dropped."""

    def diverged(self) -> None:
        """An index came again with another token."""

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        """Current sizes; `held` are the queued ones for which there is no pair of workers."""


@dataclass(slots=True)
class RequestRecord:
    """One request, as told when it ends."""

    code: int = 500
    """HTTP status sent; 499 when the client left before any was sent."""
    ending: Ending = Ending.ERROR
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    duration_s: float = 0.0
    waterfall: Waterfall | None = None
    """Times of the first prompt; None when nothing was dispatched."""
    token_waits_s: list[float] = field(default_factory=list)
    """Mean time per output token after the first one, for each choice with at least two."""


class RequestObserver(Protocol):
    """What the HTTP layer tells."""

    def tokenized(self, duration_s: float) -> None:
        """A prompt was rendered and encoded."""

    def offered(self, num_prompt_tokens: int) -> None:
        """A request asks to be let in, before any queue."""

    def tokens_came(self, gap_s: float | None, num_tokens: int) -> None:
        """Tokens of one choice came together, `gap_s` after those before; None: the first ones."""

    def ended(self, record: RequestRecord) -> None:
        """A generation request ended, however it did."""
