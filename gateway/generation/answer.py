"""One request's choices as they grow: events of the dispatcher in, texts out. Used on the event loop only.

A request with several prompts is several generations, read together; the first failure ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import UnavailableError
from pdserve.gateway.generation.choice_output import ChoiceOutput
from pdserve.gateway.generation.request import Event, FailedEvent, FinishedEvent, GenerationRequest, TokensEvent
from pdserve.gateway.generation.waterfall import Waterfall
from pdserve.reasons import CancelReason


class Source(Protocol):
    """What a generation is to this layer; see request.py."""

    waterfall: Waterfall
    num_cached_tokens: int

    async def next_events(self) -> list[Event]:
        """All events that are ready, waiting for at least one; empty at the end."""

    def finish_choice(self, choice: int) -> None:
        """No more of this choice."""

    def cancel(self, reason: CancelReason) -> None:
        """Stop everything at once."""

    def note_first_write(self) -> None:
        """The first token was written to the client."""


class Submits(Protocol):
    """What a dispatcher is to this layer; see dispatcher.py."""

    def submit(self, request: GenerationRequest) -> Source:
        """Queue a request.

        Raises:
            RequestError: it is refused at once.
        """


TokensObserver = Callable[[float | None, int], None]
"""Told (gap since the choice's tokens before, None for its first ones; how many came together)."""


@dataclass(slots=True)
class _Arrivals:
    """When a choice's tokens came, on the gateway's clock."""

    first_s: float
    last_s: float
    num_tokens: int


class Answer:
    """Generations and their choices: choice c of generation g is output g * n + c."""

    def __init__(
        self,
        generations: Sequence[Source],
        outputs: Sequence[ChoiceOutput],
        *,
        clock: Callable[[], float],
        on_tokens: TokensObserver,
    ) -> None:
        assert len(outputs) % len(generations) == 0, (len(outputs), len(generations))
        self.generations, self.outputs = generations, outputs
        self._n = len(outputs) // len(generations)
        self._clock, self._on_tokens = clock, on_tokens
        self._arrivals: dict[int, _Arrivals] = {}
        self._reads: dict[asyncio.Task[list[Event]], int] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all choices are finished."""
        return all(output.is_finished for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed."""
        return sum(generation.num_cached_tokens for generation in self.generations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(output.num_tokens for output in self.outputs)

    @property
    def token_waits_s(self) -> list[float]:
        """Mean time per output token after the first one, of each choice that has at least two."""
        arrivals = [arrival for arrival in self._arrivals.values() if arrival.num_tokens > 1]
        return [(arrival.last_s - arrival.first_s) / (arrival.num_tokens - 1) for arrival in arrivals]

    async def advance(self) -> list[ChoiceOutput]:
        """Wait for something new; the choices that have it, each once, in order.

        Raises:
            RequestError: the request failed.
        """
        which, events = await self._next_events()
        generation, touched = self.generations[which], dict[int, ChoiceOutput]()
        for event in events:
            if isinstance(event, FailedEvent):
                raise event.error
            output = self.outputs[which * self._n + event.choice]
            self._feed(output, event)
            touched[output.index] = output
        for output in touched.values():
            self._note_arrival(output)
            if output.is_finished:
                generation.finish_choice(output.index - which * self._n)
        if not events and not all(output.is_finished for output in self._outputs_of(which)):
            raise UnavailableError("The request was ended because the service is shutting down; try again.")
        return list(touched.values())

    def note_first_write(self) -> None:
        """The first token was written to the client."""
        for generation in self.generations:
            generation.note_first_write()

    def cancel(self, reason: CancelReason) -> None:
        """Stop all that is not finished, everywhere; harmless at the end."""
        for read in self._reads:
            read.cancel()
        for generation in self.generations:
            generation.cancel(reason)

    def _feed(self, output: ChoiceOutput, event: TokensEvent | FinishedEvent) -> None:
        if isinstance(event, TokensEvent):
            output.push(event)
        else:
            output.finish(event)

    def _note_arrival(self, output: ChoiceOutput) -> None:
        now_s, known = self._clock(), self._arrivals.get(output.index)
        num_new = output.num_tokens - (known.num_tokens if known else 0)
        if num_new <= 0:
            return
        self._on_tokens(now_s - known.last_s if known else None, num_new)
        first_s = known.first_s if known else now_s
        self._arrivals[output.index] = _Arrivals(first_s, now_s, output.num_tokens)

    def _outputs_of(self, which: int) -> Sequence[ChoiceOutput]:
        return self.outputs[which * self._n : (which + 1) * self._n]

    async def _next_events(self) -> tuple[int, list[Event]]:
        """Events of one generation that has some."""
        if len(self.generations) == 1:
            return 0, await self.generations[0].next_events()
        reading = set(self._reads.values())
        for which, generation in enumerate(self.generations):
            if which not in reading and not all(output.is_finished for output in self._outputs_of(which)):
                self._reads[asyncio.ensure_future(generation.next_events())] = which
        done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
        first = min(done, key=self._reads.__getitem__)
        return self._reads.pop(first), first.result()
