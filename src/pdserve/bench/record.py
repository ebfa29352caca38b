"""What is measured of one request, and how TTFT, TPOT, ITL and the hand-off gap follow from it. Pure.

N counts tokens, never events: a server may send several tokens in one event, or an event without any.
TPOT = (E2E - TTFT) / (N - 1), where E2E ends with the last token. ITL are the gaps between successive
tokens: the first token of an event carries the whole gap, further tokens of the same event a gap of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    """Tokens that arrived together, in one event."""

    at_s: float
    """On the client's monotonic clock."""
    num_tokens: int | None
    """None when the server does not tell how many tokens the text of this event is."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, from its schedule to its last byte. Times are of one monotonic clock."""

    scheduled_s: float
    """When the load pattern wanted it sent."""
    sent_s: float
    end_s: float
    arrivals: tuple[Arrival, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """None when the stream ended as it should; else why this request counts as failed."""

    @property
    def is_ok(self) -> bool:
        """Whether the client got a complete answer."""
        return self.error is None

    @property
    def has_token_times(self) -> bool:
        """Whether the arrival of each single token is known."""
        return all(arrival.num_tokens is not None for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Sent to first token; NaN without a token."""
        return self.arrivals[0].at_s - self.sent_s if self.arrivals else math.nan

    @property
    def e2e_s(self) -> float:
        """Sent to last token; NaN without a token."""
        return self.arrivals[-1].at_s - self.sent_s if self.arrivals else math.nan

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; NaN below two tokens."""
        if self.num_output_tokens < 2 or not self.arrivals:
            return math.nan
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between successive tokens (between events where the server hides token counts)."""
        gaps: list[float] = []
        previous_s: float | None = None
        for at_s, num_tokens in self.arrivals:
            if previous_s is not None:
                gaps.append(at_s - previous_s)
            gaps.extend([0.0] * ((num_tokens or 1) - 1))
            previous_s = at_s
        return gaps

    @property
    def handoff_gap_s(self) -> float:
        """Token 1 minus token 0: where a starved decode pool shows; NaN below two tokens."""
        gaps = self.itl_s
        return gaps[0] if gaps else math.nan

    @property
    def lag_s(self) -> float:
        """How late the client itself was."""
        return self.sent_s - self.scheduled_s

    def meets(self, ttft_slo_s: float | None, tpot_slo_s: float | None) -> bool:
        """Whether this request is good: complete, and within both SLOs. One token has no TPOT to miss."""
        if not self.is_ok or not self.arrivals:
            return False
        is_ttft_met = ttft_slo_s is None or self.ttft_s <= ttft_slo_s
        is_tpot_met = tpot_slo_s is None or math.isnan(self.tpot_s) or self.tpot_s <= tpot_slo_s
        return is_ttft_met and is_tpot_met
