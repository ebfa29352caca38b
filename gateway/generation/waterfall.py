"""The waterfall of one request: where its time went, on the gateway's own clock, adding up exactly.

    ttft_s  = frontend_s + queue_s + schedule_s + prefill_s + publish_s
    total_s = ttft_s + decode_s,  of which handoff_gap_s (token 1 - token 0 at the gateway) is the first part

`schedule_s` and `prefill_s` are durations that the prefill worker measured; everything else is a difference of
two readings of the gateway's clock. The clocks of two hosts are never compared, so a worker's durations may
exceed the window they have to fit into: then they are scaled down together and `publish_s` is (about) 0.
All times are multiples of 2^-20 s, which floats add without rounding: the sums hold bit for bit, in any order.
Time lost in attempts that produced no token counts as queue. Never reads a clock itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TICKS_PER_S = 2**20
"""The grid of all times, about a microsecond."""


def on_grid(time_s: float) -> float:
    """The next multiple of a tick at or below `time_s`."""
    return math.floor(time_s * TICKS_PER_S) / TICKS_PER_S


@dataclass(slots=True)
class Dispatch:
    """What is known of the dispatch that may produce a choice's first token."""

    dispatched_s: float
    schedule_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(slots=True)
class Waterfall:
    """Marks of one request in seconds of the gateway's monotonic clock; the durations are properties.

    The first choice that gets a token tells the story; marks of the other choices are ignored from then on.
    """

    received_s: float
    queued_s: float | None = None
    first_token_s: float | None = None
    """Token 0 read from the bus."""
    first_write_s: float | None = None
    """Token 0 written to the client; the HTTP layer says when."""
    second_token_s: float | None = None
    end_s: float | None = None
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    choice: int | None = None
    _dispatches: dict[int, Dispatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.received_s = on_grid(self.received_s)

    # --- marks

    def note_queued(self, now_s: float) -> None:
        """The request was let in and waits."""
        self.queued_s = on_grid(now_s)

    def note_dispatched(self, choice: int, now_s: float) -> None:
        """A job went out; again after a lost attempt, whose time then counts as queue."""
        if self.choice is None:
            self._dispatches[choice] = Dispatch(on_grid(now_s))

    def note_schedule(self, choice: int, schedule_s: float) -> None:
        """The prefill worker began, having kept the sequence waiting that long."""
        dispatch = self._dispatches.get(choice)
        if dispatch is not None and self.first_token_s is None:
            dispatch.schedule_s = schedule_s

    def note_prefill(self, choice: int, schedule_s: float, prefill_s: float) -> None:
        """What arrived with token 0 tells how long it took."""
        dispatch = self._dispatches.get(choice)
        if dispatch is not None and self.choice in (None, choice):
            dispatch.schedule_s, dispatch.prefill_s = schedule_s or dispatch.schedule_s, prefill_s

    def note_transfer(self, choice: int, transfer_s: float, transfer_bytes: int) -> None:
        """What the decode worker measured of the hand-off."""
        if self.choice in (None, choice):
            self.transfer_s, self.transfer_bytes = transfer_s, transfer_bytes

    def note_token(self, choice: int, index: int, now_s: float) -> None:
        """Token `index` of `choice` (and maybe more behind it) was read from the bus; only 0 and 1 matter."""
        if self.choice is None and index == 0:
            self.choice, self.first_token_s = choice, on_grid(now_s)
        elif choice == self.choice and index >= 1 and self.second_token_s is None:
            self.second_token_s = on_grid(now_s)

    def note_first_write(self, now_s: float) -> None:
        """The first token was written to the client; only the first call counts."""
        if self.first_write_s is None:
            self.first_write_s = on_grid(now_s)

    def note_end(self, now_s: float) -> None:
        """All choices are complete."""
        self.end_s = on_grid(now_s)

    # --- durations

    @property
    def frontend_s(self) -> float:
        """Received → queued: body, template, tokens."""
        return max(0.0, (self.queued_s or self.received_s) - self.received_s)

    @property
    def queue_s(self) -> float:
        """Queued → dispatched (for the attempt that produced token 0)."""
        queued_s = self.queued_s or self.received_s
        return max(0.0, self._dispatched_s - queued_s)

    @property
    def schedule_s(self) -> float:
        """Waiting in the prefill worker, as it reported."""
        return self._reported_s(self._dispatch.schedule_s)

    @property
    def prefill_s(self) -> float:
        """Computing the prompt, as the prefill worker reported."""
        return self._reported_s(self._dispatch.prefill_s)

    @property
    def publish_s(self) -> float:
        """What remains until token 0 was written to the client: bus, detokenizing, writing."""
        return self._window_s - self.schedule_s - self.prefill_s

    @property
    def ttft_s(self) -> float:
        """Time to first token: by definition the sum of the five stages above."""
        return self.frontend_s + self.queue_s + self.schedule_s + self.prefill_s + self.publish_s

    @property
    def decode_s(self) -> float:
        """First write → end; 0 while the end is unknown."""
        return 0.0 if self.end_s is None else max(0.0, self.end_s - self._written_s)

    @property
    def total_s(self) -> float:
        """By definition ttft_s + decode_s."""
        return self.ttft_s + self.decode_s

    @property
    def handoff_gap_s(self) -> float:
        """Token 1 - token 0 at the gateway: reserve, transfer, first step. Never more than decode_s."""
        if self.second_token_s is None or self.first_token_s is None:
            return 0.0
        gap_s = max(0.0, self.second_token_s - self.first_token_s)
        return gap_s if self.end_s is None else min(gap_s, self.decode_s)

    def as_timing(self) -> dict[str, float | int]:
        """The object that clients get as `usage.timing`."""
        return {
            "frontend_s": self.frontend_s,
            "queue_s": self.queue_s,
            "schedule_s": self.schedule_s,
            "prefill_s": self.prefill_s,
            "publish_s": self.publish_s,
            "ttft_s": self.ttft_s,
            "handoff_gap_s": self.handoff_gap_s,
            "transfer_s": self.transfer_s,
            "transfer_bytes": self.transfer_bytes,
            "decode_s": self.decode_s,
            "total_s": self.total_s,
        }

    @property
    def _dispatch(self) -> Dispatch:
        dispatch = self._dispatches.get(0 if self.choice is None else self.choice)
        return dispatch or Dispatch(self.queued_s or self.received_s)

    @property
    def _dispatched_s(self) -> float:
        return self._dispatch.dispatched_s

    @property
    def _written_s(self) -> float:
        """When token 0 reached the client; when it reached the gateway for an answer that is written in one piece."""
        written_s = self.first_write_s if self.first_write_s is not None else self.first_token_s
        return max(self._dispatched_s, self._dispatched_s if written_s is None else written_s)

    @property
    def _window_s(self) -> float:
        """Dispatched → written: what schedule, prefill and publish share."""
        return self._written_s - self._dispatched_s

    def _reported_s(self, duration_s: float) -> float:
        """A reported duration, scaled so that both reported ones fit into the window."""
        reported_s = self._dispatch.schedule_s + self._dispatch.prefill_s
        window_s = self._window_s
        return on_grid(duration_s if reported_s <= window_s else window_s * (duration_s / reported_s))
