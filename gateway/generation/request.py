"""A client's request inside the gateway, and the events that answer it. Step 2 of 8 of a request's way.

Before: the HTTP layer (chat.py, completions.py) turned a body into token ids and sampling parameters.
After: dispatcher.py queues the request, sends it to workers and feeds the `Generation` below with events.
Nothing here knows workers, messages or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.errors import RequestError
from pdserve.gateway.generation.waterfall import Waterfall
from pdserve.messages import TokenLogprobs
from pdserve.reasons import CancelReason, FinishReason
from pdserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the HTTP layer asks for. Times are on the gateway's monotonic clock."""

    request_id: str
    prompt_token_ids: list[int]
    n: int
    """Choices: sequences 0..n-1 of the same prompt."""
    sampling: SamplingParams
    deadline_s: float
    received_s: float
    priority: int = 0
    """Lower is sooner."""
    cache_salt: str = ""
    pinned_prefill: str | None = None
    """Worker id; only with test hooks on."""
    pinned_decode: str | None = None


@dataclass(slots=True)
class TokensEvent:
    """Consecutive new tokens of one choice: each index comes exactly once and in order."""

    choice: int
    index: int
    """Output index of the first one; 0 is the first token that the client ever sees."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One per token, when asked for."""


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """A choice is complete: all its tokens came before this event."""

    choice: int
    finish_reason: FinishReason
    stop_token_id: int | None
    """The end-of-sequence or stop token that ended it: the last of its tokens."""
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The whole request ends here, with this error."""

    error: RequestError


Event = TokensEvent | FinishedEvent | FailedEvent


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One dispatch, for the request's timeline."""

    choice: int
    attempt: int
    prefill: str | None
    decode: str | None
    reason: str
    """Why it ended without finishing; empty while it runs or when it finished."""


@dataclass(slots=True)
class Timeline:
    """What happened to a request: `at_s` counts from its receipt."""

    attempts: dict[tuple[int, int], AttemptRecord] = field(default_factory=dict)
    """By (choice, attempt)."""
    events: list[tuple[str, float]] = field(default_factory=list)


class Generation:
    """One request's answer as it grows; used on the event loop only.

    The dispatcher writes (`push`), one reader reads (`next_events`). Events that arrive together wake the
    reader once, and tokens of one choice that wait together are merged into one event.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        on_cancel: Callable[[CancelReason], None],
        on_finish_choice: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.waterfall = Waterfall(request.received_s)
        self.timeline = Timeline()
        self.num_cached_tokens = 0
        """Prompt tokens of choice 0 that the prefill worker did not have to compute."""
        self.error: RequestError | None = None
        self._open_choices = set(range(request.n))
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._on_cancel, self._on_finish_choice, self._clock = on_cancel, on_finish_choice, clock

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be pushed (what was pushed may still wait to be read)."""
        return not self._open_choices

    async def next_events(self) -> list[Event]:
        """Everything that is ready, in order; waits for at least one. Empty: the request is over."""
        while not self._events and self._open_choices:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        return events

    def finish_choice(self, choice: int) -> None:
        """The reader has enough of this choice (a stop string appeared): no event of it comes any more."""
        if choice in self._open_choices:
            self._events = [event for event in self._events if getattr(event, "choice", None) != choice]
            self._close(choice)
            self._on_finish_choice(choice)

    def cancel(self, reason: CancelReason) -> None:
        """Stop everything at once, everywhere."""
        if self._open_choices:
            self._open_choices.clear()
            self._events.clear()
            self._wake.set()
            self._on_cancel(reason)

    def note_first_write(self) -> None:
        """The first token was written to the client."""
        self.waterfall.note_first_write(self._clock())

    # --- the dispatcher's side

    def push(self, event: Event) -> None:
        """Hand one event to the reader, its lists included; events of choices that are over are dropped."""
        if isinstance(event, FailedEvent):
            if self._open_choices:
                self.error = event.error
                self._events.append(event)
                self._open_choices.clear()
                self.waterfall.note_end(self._clock())
        elif event.choice in self._open_choices:
            self._append(event)
        self._wake.set()

    def _append(self, event: TokensEvent | FinishedEvent) -> None:
        if isinstance(event, FinishedEvent):
            self._events.append(event)
            self._close(event.choice)
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, TokensEvent) and last.choice == event.choice:
            last.token_ids.extend(event.token_ids)
            if last.logprobs is not None:
                last.logprobs.extend(event.logprobs or [])
        else:
            self._events.append(event)

    def _close(self, choice: int) -> None:
        self._open_choices.discard(choice)
        if not self._open_choices:
            self.waterfall.note_end(self._clock())
            self._wake.set()

    def note_event(self, name: str, now_s: float) -> None:
        """Append to the timeline."""
        self.timeline.events.append((name, now_s - self.request.received_s))
