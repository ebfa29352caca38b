"""A dispatcher that plays scripts instead of asking workers, and a real HTTP server around it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdserve.errors import RequestError
from pdserve.gateway.app import create_app
from pdserve.gateway.generation.request import FailedEvent, FinishedEvent, Generation, GenerationRequest, TokensEvent
from pdserve.gateway.http.system_routes import SystemView
from pdserve.gateway.observers import RequestRecord
from pdserve.gateway.openai.frontend import Frontend, FrontendLimits
from pdserve.gateway.text.chat_prompt import ChatPrompts
from pdserve.http_protocol import ConnectionLimits
from pdserve.http_server import HttpServer, listen, url_of
from pdserve.messages import TokenLogprobs
from pdserve.models.card import ModelCard
from pdserve.models.tiny_tokenizer import build_tokenizer
from pdserve.readiness import Readiness, ReadyReason

Step = list[int] | str | RequestError | asyncio.Event
"""Tokens that come together; a finish reason; a failure; or something to wait for."""
Script = Callable[[GenerationRequest, int], Iterable[Step]]


CONNECTION_LIMITS = [field.name for field in dataclasses.fields(ConnectionLimits)]
READY = Readiness(ready=True, reason=ReadyReason.READY, message="This gateway takes requests.")


@dataclass
class Records:
    """What the HTTP layer tells a metrics library."""

    ended_requests: list[RequestRecord] = field(default_factory=list)

    def tokenized(self, duration_s: float) -> None:
        pass

    def offered(self, num_prompt_tokens: int) -> None:
        pass

    def tokens_came(self, gap_s: float | None, num_tokens: int) -> None:
        pass

    def ended(self, record: RequestRecord) -> None:
        self.ended_requests.append(record)


@dataclass
class ScriptedDispatcher:
    """Plays `script(request, choice)` for every choice, with max_tokens and made-up log-probabilities."""

    script: Script
    max_total_tokens: int | None = 4096
    readiness: Readiness = READY
    eos_token_ids: frozenset[int] = frozenset()
    num_cached_tokens: int = 0
    refusal: RequestError | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    cancels: list[tuple[str, str]] = field(default_factory=list)
    finished_choices: list[int] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def submit(self, request: GenerationRequest) -> Generation:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        generation = Generation(
            request,
            on_cancel=lambda reason: self._note_cancel(request.request_id, reason),
            on_finish_choice=self.finished_choices.append,
            clock=time.monotonic,
        )
        generation.num_cached_tokens = self.num_cached_tokens
        now_s = time.monotonic()
        generation.waterfall.note_queued(now_s)
        task = asyncio.create_task(self._play(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def _play(self, generation: Generation) -> None:
        for choice in range(generation.request.n):
            generation.waterfall.note_dispatched(choice, time.monotonic())
        request = generation.request
        if request.sampling.prompt_logprobs is not None:
            generation.add_prompt_logprobs(prompt_scores(request.prompt_token_ids, request.sampling.prompt_logprobs))
        await asyncio.gather(*[self._play_choice(generation, choice) for choice in range(generation.request.n)])

    async def _play_choice(self, generation: Generation, choice: int) -> None:
        request, index, last = generation.request, 0, -1
        limit = request.sampling.max_tokens
        for step in self.script(request, choice):
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, RequestError):
                generation.push(FailedEvent(step))
                return
            elif isinstance(step, str):
                stop_id = last if step == "stop" and last in self._stop_ids(request) else None
                generation.push(FinishedEvent(choice, step, stop_id, index))
                return
            else:
                ids = step[: limit - index]
                for offset in range(len(ids)):
                    generation.waterfall.note_token(choice, index + offset, time.monotonic())
                has_logprobs = request.sampling.logprobs is not None
                logprobs = [_logprobs(request, token_id) for token_id in ids] if has_logprobs else None
                generation.push(TokensEvent(choice, index, list(ids), logprobs))
                index, last = index + len(ids), ids[-1] if ids else last
                if index >= limit:
                    break
        generation.push(FinishedEvent(choice, "length", None, index))

    def _stop_ids(self, request: GenerationRequest) -> frozenset[int]:
        return self.eos_token_ids | set(request.sampling.stop_token_ids)

    def _note_cancel(self, request_id: str, reason: str) -> None:
        self.cancels.append((request_id, reason))
        self.cancelled.set()


def _logprobs(request: GenerationRequest, token_id: int) -> TokenLogprobs:
    """The token itself, the next id, then a masked one."""
    count = request.sampling.logprobs or 0
    alternatives = [(token_id, -0.25), (token_id + 1, -1.5), (3, float("-inf"))][:count]
    return TokenLogprobs(
        logprob=-0.25, top_token_ids=[token for token, _ in alternatives], top_logprobs=[lp for _, lp in alternatives]
    )


def prompt_scores(token_ids: list[int], count: int) -> list[TokenLogprobs]:
    """Token n has -n; the next id is likelier, the one after it masked."""
    result = []
    for place, token_id in enumerate(token_ids[1:], 1):
        top = [(token_id + 1, -0.5), (token_id, -float(place)), (token_id + 2, float("-inf"))][:count]
        ids, logprobs = [token for token, _ in top], [logprob for _, logprob in top]
        result.append(TokenLogprobs(logprob=-float(place), top_token_ids=ids, top_logprobs=logprobs, rank=2))
    return result


@dataclass
class Service:
    """A running gateway without workers."""

    url: str
    client: httpx.AsyncClient
    dispatcher: ScriptedDispatcher
    frontend: Frontend

    def ids(self, text: str) -> list[int]:
        return self.frontend.prompts.tokenizer.encode(text)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)


@asynccontextmanager
async def running(
    model: Path, script: Script, limits: FrontendLimits | None = None, **options: Any
) -> AsyncIterator[Service]:
    """Serve on a free port until the block ends."""
    card = ModelCard.load(model, served_name=options.pop("served_name", "tiny"))
    faults = options.pop("faults", None)
    connection = {name: options.pop(name) for name in CONNECTION_LIMITS if name in options}
    dispatcher = ScriptedDispatcher(script, eos_token_ids=card.eos_token_ids, **options)
    seeds, records = itertools.count(1), Records()
    with ThreadPoolExecutor(2) as executor:
        frontend = Frontend(
            card,
            ChatPrompts.load(card.path, card.chat_template),
            dispatcher,
            executor,
            draw_seed=lambda: next(seeds),
            observer=records,
            limits=limits or FrontendLimits(),
            has_pins=faults is not None,
        )
        view = SystemView(
            readiness=lambda: dispatcher.readiness,
            render_metrics=lambda: (b"pd_bus_up 1.0\n", "text/plain; version=0.0.4"),
            faults=faults,
        )
        sock = listen("127.0.0.1", 0)
        server = HttpServer(create_app(frontend, view), sock, ConnectionLimits(**connection))
        task = asyncio.create_task(server.run())
        try:
            async with httpx.AsyncClient(base_url=url_of(sock), timeout=30) as client:
                yield Service(url_of(sock), client, dispatcher, frontend)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def speak(text: str, *, reason: str = "stop", together: int = 1) -> Script:
    """A script that says `text`, `together` tokens at a time; the ids are those of the tiny model."""
    ids = build_tokenizer().encode(text).ids
    return lambda request, choice: [*[ids[n : n + together] for n in range(0, len(ids), together)], reason]


def refuse_constant(name: str) -> float:
    """NaN and Infinity are no JSON."""
    raise ValueError(name)


def events_of(text: str) -> list[dict[str, Any] | str]:
    """Parse a stream strictly: each event an id line and a data line after comments, `[DONE]` as text."""
    events: list[dict[str, Any] | str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        id_line, data_line = [line for line in block.split("\n") if not line.startswith(":")]
        assert id_line.startswith("id: "), block
        assert id_line.endswith(f":{len(events)}"), block
        assert data_line.startswith("data: "), block
        data = data_line.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data, parse_constant=refuse_constant))
    return events
