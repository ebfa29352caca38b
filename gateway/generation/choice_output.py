"""One choice's way from token ids to text: stop tokens, detokenizing, stop strings, counting. Pure.

Every piece of text passes the same pipeline, what is left at the end too. A token that may be the terminal one
(end of sequence, stop token) is held until the next event tells: as the terminal one it counts, but shows no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.gateway.detokenize import Detokenizer
from pdserve.gateway.generation.request import FinishedEvent, TokensEvent
from pdserve.gateway.text.stop_strings import StopMatcher
from pdserve.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A generated token with its log-probabilities, and the text that it brought."""

    token_id: int
    text: str
    """Joined over all tokens this is the text: a part of a character brings nothing, its last part all of it."""
    is_hidden: bool
    """A special token that is not shown, or the terminal token."""
    logprobs: TokenLogprobs


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
        stops: StopMatcher,
        terminal_ids: frozenset[int],
        hidden_ids: frozenset[int] = frozenset(),
        has_logprobs: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`terminal_ids` may end the sequence, `hidden_ids` bring no text, no stop string ends before `min_tokens`."""
        self.index = index
        self.num_tokens = 0
        """Up to and including the one that ended the choice."""
        self.finish_reason: str | None = None
        self._detokenizer, self._stops = detokenizer, stops
        self._terminal_ids, self._hidden_ids = terminal_ids, hidden_ids
        self._has_logprobs, self._min_tokens = has_logprobs, min_tokens
        self._held: tuple[int, TokenLogprobs | None] | None = None
        self._delta = Delta()

    @property
    def is_finished(self) -> bool:
        """Whether the finish reason is known; nothing is taken any more."""
        return self.finish_reason is not None

    @property
    def has_text(self) -> bool:
        """Whether there is text to show."""
        return bool(self._delta.text)

    def push(self, event: TokensEvent) -> None:
        """New tokens."""
        if self.is_finished:
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
        """All tokens came."""
        if self.is_finished:
            return
        if self._held is not None:
            token_id, logprobs = self._held
            self._held = None
            if token_id == event.stop_token_id and not self._stops.is_included:
                self._count(token_id, "", logprobs, is_hidden=True)
            else:
                self._accept([token_id], [logprobs])
        if not self.is_finished:
            self._delta.text += self._stops.push(self._detokenizer.finish())
            self._delta.text += self._stops.finish()
            self.finish_reason = "stop" if self._stops.is_matched else event.finish_reason

    def take(self) -> Delta:
        """What is to be shown now."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _accept(self, ids: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        if not self._stops.stops and not self._has_logprobs:
            self._delta.text += self._detokenizer.push(ids)
            self._delta.token_ids += ids
            self.num_tokens += len(ids)
            return
        for token_id, logprob in zip(ids, logprobs, strict=True):
            text = self._detokenizer.push([token_id])
            self._count(token_id, text, logprob, is_hidden=token_id in self._hidden_ids)
            self._delta.text += self._stops.push(text) if self.num_tokens >= self._min_tokens else text
            if self._stops.is_matched:
                self.finish_reason = "stop"
                return

    def _count(self, token_id: int, text: str, logprobs: TokenLogprobs | None, *, is_hidden: bool) -> None:
        self.num_tokens += 1
        self._delta.token_ids.append(token_id)
        if self._has_logprobs and logprobs is not None:
            self._delta.entries.append(TokenEntry(token_id, text, is_hidden, logprobs))
