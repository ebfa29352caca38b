"""One request's choices as they grow: events of the dispatcher in, texts out. Used on the event loop only.

A choice's way from token ids to text: stop tokens, detokenizing, stop strings, counting. Every piece of text passes
the same pipeline, what is left at the end too: it belongs to the last token that is not hidden. A token that may be
the terminal one (end of sequence, stop token) is held until the next event tells: as the terminal one it counts, but
shows no text.
A request with several prompts is several generations, read together; the first failure ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.errors import UnavailableError
from pdserve.gateway.generation.request import FailedEvent, FinishedEvent, Generation, TokensEvent
from pdserve.gateway.text.stop_strings import StopMatcher
from pdserve.gateway.text.tokenizer import Detokenizer
from pdserve.messages import TokenLogprobs
from pdserve.reasons import CancelReason, FinishReason


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A generated or echoed token with its log-probabilities, and the text that it brought."""

    token_id: int
    text: str
    """Joined over all tokens this is the text: a part of a character brings nothing, its last part all of it."""
    is_hidden: bool
    """A special token that is not shown, or the terminal token."""
    logprobs: TokenLogprobs | None
    """None: the first token of a prompt."""


@dataclass(slots=True)
class Delta:
    """What a choice has to show since it was last asked."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)


class ChoiceOutput:
    """The state of one choice."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stops: StopMatcher | None = None,
        terminal_ids: frozenset[int],
        hidden_ids: frozenset[int] = frozenset(),
        has_logprobs: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`terminal_ids` may end the sequence, `hidden_ids` bring no text, no stop string ends before `min_tokens`."""
        self.index = index
        self.num_tokens = 0
        """Tokens up to and including the one that ended the choice."""
        self.finish_reason: FinishReason | None = None
        """How the choice ended; nothing is taken any more then."""
        self.delta = Delta()
        """What `take` would hand out now."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """One for each prompt token from the second one on, complete with the first event; empty unless asked for."""
        self._detokenizer, self._stops = detokenizer, stops
        self._terminal_ids, self._hidden_ids = terminal_ids, hidden_ids
        self._has_logprobs, self._min_tokens = has_logprobs, min_tokens
        self._held: tuple[int, TokenLogprobs | None] | None = None

    def push(self, event: TokensEvent) -> None:
        """Take in new tokens."""
        if self.finish_reason is not None:
            return
        ids = event.token_ids
        logprobs: list[TokenLogprobs | None] = [*(event.logprobs or [])] or [None for _ in ids]
        if self._held is not None:
            ids, logprobs = [self._held[0], *ids], [self._held[1], *logprobs]
            self._held = None
        if ids and ids[-1] in self._terminal_ids:
            self._held = (ids[-1], logprobs[-1])
            ids, logprobs = ids[:-1], logprobs[:-1]
        self._accept(ids, logprobs)

    def finish(self, event: FinishedEvent) -> None:
        """Take in the end: all tokens came."""
        if self.finish_reason is not None:
            return
        stops = self._stops
        if self._held is not None:
            token_id, logprobs = self._held
            self._held = None
            if token_id == event.stop_token_id and not (stops is not None and stops.is_included):
                self._count(token_id, "", logprobs, is_hidden=True)
            else:
                self._accept([token_id], [logprobs])
        if self.finish_reason is None:
            rest = self._detokenizer.finish()
            if rest and self.delta.entries:
                entries, last = self.delta.entries, _last_shown(self.delta.entries)
                entries[last] = replace(entries[last], text=entries[last].text + rest)
            self.delta.text += rest if stops is None else stops.push(rest) + stops.finish()
            is_stopped = stops is not None and stops.is_matched
            self.finish_reason = FinishReason.STOP if is_stopped else event.finish_reason

    def take(self) -> Delta:
        """What is to be shown now; a token with a part of a character waits, in case that the rest never comes."""
        delta, self.delta = self.delta, Delta()
        if delta.entries and self.finish_reason is None and self._detokenizer.has_rest:
            cut = _last_shown(delta.entries)  # with log-probabilities, entries and token ids go together
            self.delta = Delta(token_ids=delta.token_ids[cut:], entries=delta.entries[cut:])
            delta = Delta(delta.text, delta.token_ids[:cut], delta.entries[:cut])
        return delta

    def _accept(self, ids: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        stops = self._stops
        if stops is None and not self._has_logprobs:
            self.delta.text += self._detokenizer.push(ids)
            self.delta.token_ids += ids
            self.num_tokens += len(ids)
            return
        for token_id, logprob in zip(ids, logprobs, strict=True):
            text = self._detokenizer.push([token_id])
            self._count(token_id, text, logprob, is_hidden=token_id in self._hidden_ids)
            self.delta.text += text if stops is None or self.num_tokens < self._min_tokens else stops.push(text)
            if stops is not None and stops.is_matched:
                self.finish_reason = FinishReason.STOP
                return

    def _count(self, token_id: int, text: str, logprobs: TokenLogprobs | None, *, is_hidden: bool) -> None:
        self.num_tokens += 1
        self.delta.token_ids.append(token_id)
        if self._has_logprobs and logprobs is not None:
            self.delta.entries.append(TokenEntry(token_id, text, is_hidden, logprobs))


class PromptOutput(ChoiceOutput):
    """A choice of which the prompt alone is wanted: what is sampled behind it is not shown and not counted."""

    def push(self, event: TokensEvent) -> None:
        """Drop the token behind the prompt."""

    def finish(self, event: FinishedEvent) -> None:
        """Take in the end."""
        self.finish_reason = FinishReason.LENGTH


def _last_shown(entries: Sequence[TokenEntry]) -> int:
    """Place of the last entry whose token is not hidden."""
    return next((n for n in reversed(range(len(entries))) if not entries[n].is_hidden), len(entries) - 1)


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
        generations: Sequence[Generation],
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
        for output in outputs:
            output.prompt_logprobs = generations[output.index // self._n].prompt_logprobs
        self._wake = generations[0].wake
        for generation in generations:
            generation.wake = self._wake
        self._wake.set()

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed."""
        return sum(generation.num_cached_tokens for generation in self.generations)

    def num_prompt_tokens_of(self, output: ChoiceOutput) -> int:
        """Tokens of the prompt that a choice continues."""
        return len(self.generations[output.index // self._n].request.prompt_token_ids)

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
        """Wait for something new; the choices that have it, each once, in order. Empty: all are finished.

        Raises:
            RequestError: the request failed.
        """
        while any(output.finish_reason is None for output in self.outputs):
            self._wake.clear()
            touched = self._take_events()
            if touched:
                return touched
            await self._wake.wait()
        return []

    def cancel(self, reason: CancelReason) -> None:
        """Stop all that is not finished, everywhere; harmless at the end."""
        for generation in self.generations:
            generation.cancel(reason)

    def _take_events(self) -> list[ChoiceOutput]:
        """Feed the choices with everything that came; those that got something."""
        touched: dict[int, ChoiceOutput] = {}
        for which, generation in enumerate(self.generations):
            first = which * self._n
            events = generation.take_events()
            for event in events:
                if isinstance(event, FailedEvent):
                    raise event.error
                output = self.outputs[first + event.choice]
                if isinstance(event, TokensEvent):
                    output.push(event)
                else:
                    output.finish(event)
                touched[output.index] = output
            outputs = self.outputs[first : first + self._n]
            if not events and generation.is_done and any(output.finish_reason is None for output in outputs):
                raise UnavailableError("The request was ended because the service is shutting down; try again.")
        for output in touched.values():
            self._note_arrival(output)
            if output.finish_reason is not None:
                self.generations[output.index // self._n].finish_choice(output.index % self._n)
        return list(touched.values())

    def _note_arrival(self, output: ChoiceOutput) -> None:
        now_s, known = self._clock(), self._arrivals.get(output.index)
        num_new = output.num_tokens - (known.num_tokens if known else 0)
        if num_new <= 0:
            return
        self._on_tokens(now_s - known.last_s if known else None, num_new)
        first_s = known.first_s if known else now_s
        self._arrivals[output.index] = _Arrivals(first_s, now_s, output.num_tokens)
