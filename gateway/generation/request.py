"""What a client asks for, and the events that answer it. Step 2 of 8 of a request's way.

Before: the HTTP layer (openai/chat.py, completions.py) turned a body into token ids and sampling parameters.
After: dispatch/dispatcher.py queues the request, sends its jobs to workers and feeds the `Generation` below with
events. A `GenerationRequest` is the only object that carries priority, salt, pins and sampling through the gateway:
everything behind it holds the request, and the jobs for workers are made of it. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from pdserve.errors import RequestError
from pdserve.gateway.generation.waterfall import Waterfall
from pdserve.ids import Fingerprint, GatewayId, RequestId
from pdserve.messages import AttemptKey, DecodeJob, PrefillJob, TokenLogprobs
from pdserve.reasons import CancelReason, FinishReason
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams


class Sender(NamedTuple):
    """Who sends jobs, and for which model: the same in all messages of one gateway."""

    gateway_id: GatewayId
    fingerprint: Fingerprint
    """Model fingerprint: a worker of another model refuses the job."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the HTTP layer asks for. Times are on the gateway's monotonic clock."""

    request_id: RequestId
    prompt_token_ids: list[int]
    n: int
    """Number of choices: sequences 0..n-1 of the same prompt."""
    sampling: SamplingParams
    deadline_s: float
    received_s: float
    terminal_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence: the model's, unless they are ignored, and the client's stop tokens."""
    priority: int = 0
    """A request with a lower number goes sooner."""
    cache_salt: str = ""
    pinned_prefill: str | None = None
    """Id of a prefill worker; set only with test hooks on."""
    pinned_decode: str | None = None

    def num_left(self, num_output_tokens: int) -> int:
        """Output tokens of a choice that may still come after so many."""
        return self.sampling.max_tokens - num_output_tokens

    def natural_end(self, output: list[int]) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop token) when these tokens are already a whole answer.

        Needed only when a worker's Finished was lost together with the worker: computing on would add tokens
        behind the end.
        """
        if output and output[-1] in self.terminal_ids:
            return FinishReason.STOP, output[-1]
        return (FinishReason.LENGTH, None) if output and self.num_left(len(output)) <= 0 else None

    @property
    def num_scored_tokens(self) -> int:
        """Leading prompt tokens whose log-probabilities are to be told, the first one (it has none) included."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids)

    def _sampling(self, choice: int, *, is_scored: bool) -> SamplingParams:
        """What a job asks for: the prompt is scored once, for choice 0, before its first token."""
        if self.sampling.prompt_logprobs is None or (is_scored and choice == 0):
            return self.sampling
        return msgspec.structs.replace(self.sampling, prompt_logprobs=None)

    def _job_fields(
        self, sender: Sender, key: AttemptKey, output: list[int], now_s: float, *, is_scored: bool
    ) -> dict[str, Any]:
        """What both jobs of an attempt say alike."""
        return {
            "request_id": key.request_id,
            "choice": key.choice,
            "attempt": key.attempt,
            "nonce": key.nonce,
            "gateway_id": sender.gateway_id,
            "fingerprint": sender.fingerprint,
            "prompt_token_ids": self.prompt_token_ids + output,
            "num_original_prompt_tokens": len(self.prompt_token_ids),
            "sampling": self._sampling(key.choice, is_scored=is_scored),
            "remaining_s": self.deadline_s - now_s,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
        }

    def prefill_job(self, sender: Sender, key: AttemptKey, output: list[int], now_s: float) -> PrefillJob:
        """The job to compute the prompt, and all tokens emitted so far, up to the next token."""
        return PrefillJob(
            **self._job_fields(sender, key, output, now_s, is_scored=not output),
            will_decode=self.num_left(len(output)) > 1,
        )

    def decode_job(
        self, sender: Sender, key: AttemptKey, output: list[int], prefill: WorkerRef | None, now_s: float
    ) -> DecodeJob:
        """The job to go on from what `prefill` computes; without it, to compute the prompt too."""
        return DecodeJob(
            **self._job_fields(sender, key, output, now_s, is_scored=not output and prefill is None),
            prefill_worker_id=prefill.worker_id if prefill else None,
            prefill_generation=prefill.generation if prefill else None,
        )


@dataclass(slots=True)
class TokensEvent:
    """Consecutive new tokens of one choice: each index comes exactly once and in order."""

    choice: int
    index: int
    """Output index of the first one; 0 is the first token that the client ever sees."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, when the client asked for them."""


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


class Generation:
    """One request's answer as it grows; used on the event loop only.

    The dispatcher writes (`push`), one reader reads: it waits for `wake` and takes what there is. Events that arrive
    together wake the reader once, and tokens of one choice that wait together are merged into one event.
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
        self.num_cached_tokens = 0
        """Prompt tokens of choice 0 that the prefill worker did not have to compute."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """One for each prompt token from the second one on, as far as they came; empty unless asked for."""
        self.wake = asyncio.Event()
        """Set when there is something to take; a reader of several generations lets them share one."""
        self._open_choices = set(range(request.n))
        self._events: list[Event] = []
        self._on_cancel, self._on_finish_choice, self._clock = on_cancel, on_finish_choice, clock

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be pushed (what was pushed may still wait to be taken)."""
        return not self._open_choices

    def take_events(self) -> list[Event]:
        """Everything that is ready, in order; the choices of a prompt that is scored wait for that."""
        if 1 + len(self.prompt_logprobs) < self.request.num_scored_tokens:
            return [event for event in self._events if isinstance(event, FailedEvent)]
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
            self.wake.set()
            self._on_cancel(reason)

    # --- the dispatcher's side

    def push(self, event: Event) -> None:
        """Hand one event to the reader, its lists included; events of choices that are over are dropped."""
        if isinstance(event, FailedEvent):
            if self._open_choices:
                self._events.append(event)
                self._open_choices.clear()
                self.waterfall.note_end(self._clock())
        elif event.choice in self._open_choices:
            last = self._events[-1] if self._events else None
            if isinstance(event, FinishedEvent):
                self._events.append(event)
                self._close(event.choice)
            elif isinstance(last, TokensEvent) and last.choice == event.choice:
                last.token_ids.extend(event.token_ids)
                if last.logprobs is not None:
                    last.logprobs.extend(event.logprobs or [])
            else:
                self._events.append(event)
        self.wake.set()

    def add_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Hand the reader log-probabilities of the prompt's next tokens."""
        self.prompt_logprobs.extend(logprobs)
        self.wake.set()

    def _close(self, choice: int) -> None:
        self._open_choices.discard(choice)
        if not self._open_choices:
            self.waterfall.note_end(self._clock())
            self.wake.set()
