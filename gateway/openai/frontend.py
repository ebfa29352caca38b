"""What all endpoints share: the model, the way to the dispatcher, threads for CPU work, limits. No HTTP routes here.

Templates and tokenizing run in threads, never on the event loop: a prompt of megabytes stalls no stream and no
health check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from pdserve.errors import InvalidRequestError, UnavailableError
from pdserve.gateway.generation.answer import Answer, Submits
from pdserve.gateway.generation.choice_output import ChoiceOutput
from pdserve.gateway.generation.request import GenerationRequest
from pdserve.gateway.http.error_body import http_error
from pdserve.gateway.http.fields import Fields
from pdserve.gateway.http.sse import Responder
from pdserve.gateway.observers import RequestObserver, RequestRecord, SilentRequestObserver
from pdserve.gateway.openai.options import Options
from pdserve.gateway.text.chat_prompt import ChatPrompts
from pdserve.gateway.text.stop_strings import StopMatcher
from pdserve.models.card import ModelCard
from pdserve.reasons import CancelReason
from pdserve.settings import GatewaySettings

P = ParamSpec("P")
T = TypeVar("T")


class Dispatches(Submits, Protocol):
    """The dispatcher as endpoints see it."""

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served."""

    @property
    def max_total_tokens(self) -> int | None:
        """Prompt and output tokens that fit into every pair; None while there is no pair."""


@dataclass(frozen=True)
class FrontendLimits:
    """Bounds of one gateway, in seconds and bytes."""

    max_body_bytes: int = GatewaySettings.max_body_bytes
    body_timeout_s: float = 60.0
    request_deadline_s: float = GatewaySettings.request_deadline_s
    sse_keepalive_s: float = GatewaySettings.sse_keepalive_s
    client_stall_timeout_s: float = GatewaySettings.client_stall_timeout_s


@dataclass
class Call:
    """One HTTP request on its way."""

    request_id: str
    received_s: float
    has_timing: bool
    """`X-PDServe-Timing: 1`."""
    pinned_prefill: str | None
    pinned_decode: str | None
    responder: Responder
    record: RequestRecord = field(default_factory=RequestRecord)


@dataclass
class Frontend:
    """One gateway's HTTP side."""

    card: ModelCard
    prompts: ChatPrompts
    dispatcher: Dispatches
    executor: Executor
    draw_seed: Callable[[], int]
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    observer: RequestObserver = field(default_factory=SilentRequestObserver)
    has_pins: bool = False
    """Test hooks are on: headers may pin the pair."""
    clock: Callable[[], float] = time.monotonic
    is_draining: bool = False
    num_active: int = 0
    """Requests for tokens that have not ended."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A request for tokens is in hand."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return once no request for tokens is in hand."""
        while self.num_active:
            self._idle.clear()
            await self._idle.wait()

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU work off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: work(*args, **kwargs))

    def check_model(self, fields: Fields) -> None:
        """A request names this model, or none.

        Raises:
            RequestError: 404.
        """
        name = fields.text("model")
        if name is not None and name != self.card.served_name:
            error = http_error(404, f"The model {name[:80]!r} does not exist here.", code="model_not_found")
            error.param = "model"
            raise error

    def check_open(self) -> None:
        """Nothing new is taken while the gateway drains.

        Raises:
            UnavailableError: it does.
        """
        if self.is_draining:
            raise UnavailableError("The service is shutting down; try again.", code="shutting_down", retry_after_s=1.0)

    def start(
        self,
        call: Call,
        prompts: Sequence[list[int]],
        options: Options,
        *,
        default_max_tokens: int | None,
        continues: bool,
    ) -> Answer:
        """Submit one generation per prompt.

        Args:
            default_max_tokens: when the client gave none; None = the rest of the context.
            continues: the output goes on where the prompt's text ended.

        Raises:
            RequestError: a prompt is empty or too long, or the dispatcher refuses.
        """
        requests = [
            self._request(call, number, len(prompts), token_ids, options, default_max_tokens)
            for number, token_ids in enumerate(prompts)
        ]
        call.record.num_prompt_tokens = sum(map(len, prompts))
        generations = []
        try:
            for request in requests:
                self.observer.offered(len(request.prompt_token_ids))
                generations.append(self.dispatcher.submit(request))
        except BaseException:
            for generation in generations:
                generation.cancel(CancelReason.CLIENT)
            raise
        call.record.waterfall = generations[0].waterfall
        outputs = [self._output(index, options, continues) for index in range(len(requests) * options.n)]
        return Answer(generations, outputs, clock=self.clock, on_tokens=self.observer.tokens_came)

    def _request(
        self,
        call: Call,
        number: int,
        num_prompts: int,
        token_ids: list[int],
        options: Options,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty and this model has no token to begin with", param="prompt")
        limit = min(self.card.max_model_len, self.dispatcher.max_total_tokens or self.card.max_model_len)
        return GenerationRequest(
            request_id=call.request_id if num_prompts == 1 else f"{call.request_id}-{number}",
            prompt_token_ids=token_ids,
            n=options.n,
            sampling=options.sampling_for(len(token_ids), limit, default_max_tokens),
            deadline_s=call.received_s + self.limits.request_deadline_s,
            received_s=call.received_s,
            priority=options.priority,
            cache_salt=options.cache_salt,
            pinned_prefill=call.pinned_prefill,
            pinned_decode=call.pinned_decode,
        )

    def _output(self, index: int, options: Options, continues: bool) -> ChoiceOutput:
        sampling, tokenizer = options.sampling, self.prompts.tokenizer
        eos_ids = frozenset[int]() if sampling.ignore_eos else self.card.eos_token_ids
        return ChoiceOutput(
            index,
            tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens, continues=continues),
            stops=StopMatcher(options.stops, options.is_stop_included),
            terminal_ids=eos_ids | set(sampling.stop_token_ids),
            hidden_ids=tokenizer.special_ids if options.skip_special_tokens else frozenset(),
            has_logprobs=sampling.logprobs is not None,
            min_tokens=sampling.min_tokens,
        )
