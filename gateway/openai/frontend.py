"""What all endpoints share: the model, the way to the dispatcher, threads for CPU work, limits. No HTTP routes here.

Templates and tokenizing run in threads (`executor`), never on the event loop: a prompt of megabytes stalls no stream
and no health check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.gateway.generation.request import Generation, GenerationRequest
from pdserve.gateway.http.sse import Responder
from pdserve.gateway.observers import RequestObserver, RequestRecord
from pdserve.gateway.text.chat_prompt import ChatPrompts
from pdserve.ids import RequestId
from pdserve.models.card import ModelCard
from pdserve.settings import GatewaySettings


class Dispatches(Protocol):
    """The dispatcher as endpoints see it."""

    @property
    def max_total_tokens(self) -> int | None:
        """Prompt and output tokens that fit into every pair; None while there is no pair."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Take in a request, which may wait.

        Raises:
            RequestError: it is refused at once.
        """


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

    request_id: RequestId
    model: str
    """The name by which the client calls the model."""
    received_s: float
    has_timing: bool
    """The header `X-PDServe-Timing: 1` was sent."""
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
    observer: RequestObserver
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    has_pins: bool = False
    """Test hooks are on: headers may pin the pair."""
    clock: Callable[[], float] = time.monotonic
    is_draining: bool = False
    """Set by the process at its end: requests for tokens are refused."""
    num_active: int = 0
    """Requests for tokens that have not ended."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a request for tokens has ended."""

    async def wait_until_idle(self) -> None:
        """Return once no request for tokens is in hand."""
        while self.num_active:
            self.has_ended.clear()
            await self.has_ended.wait()
