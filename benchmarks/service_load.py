"""Load on any OpenAI-compatible server, made of the parts of `pdserve bench`. Never starts a server.

Every prompt is different from its first token on and made before anything is sent.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

from pdserve.bench.client import Target, send
from pdserve.bench.connection import ConnectionPool, OnBody
from pdserve.bench.load import run_closed
from pdserve.bench.prompts import Prompt, TokenPrompts
from pdserve.bench.record import Arrival, RequestRecord
from pdserve.bench.server import Server

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Interference:
    """Running streams, and what arrived beside them."""

    streams: list[RequestRecord]
    arrived: list[RequestRecord]

    @property
    def calm_gaps_s(self) -> list[float]:
        """Gaps between tokens while all streams run and nothing else is computed."""
        return self._gaps_s(max(record.arrivals[0].at_s for record in self.streams), self._arrival_s)

    @property
    def disturbed_gaps_s(self) -> list[float]:
        """Gaps that touch the time in which the arrived prompts waited or were computed."""
        return self._gaps_s(self._arrival_s, self._computed_s)

    @property
    def is_covered(self) -> bool:
        """Whether all streams ran for as long as that."""
        return min(record.arrivals[-1].at_s for record in self.streams) >= self._computed_s

    @property
    def _arrival_s(self) -> float:
        return min(record.sent_s for record in self.arrived)

    @property
    def _computed_s(self) -> float:
        return max(record.arrivals[0].at_s for record in self.arrived)

    def _gaps_s(self, from_s: float, to_s: float) -> list[float]:
        pairs = (pair for record in self.streams for pair in itertools.pairwise(record.arrivals))
        return [after.at_s - before.at_s for before, after in pairs if after.at_s > from_s and before.at_s < to_s]


class _Watched:
    """Stands before the connections: notes when a stream's events arrive, which carry a token or more, and counts."""

    def __init__(self, pool: ConnectionPool, num_events: int) -> None:
        self.is_calm = asyncio.Event()
        self.sent_s = 0.0
        self.arrivals: list[Arrival] = []
        self._pool, self._num_missing = pool, num_events

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send as the pool does, and note each arrival; a request that ends early is calm too."""
        self.sent_s = time.perf_counter()

        def on_piece(piece: bytes, now_s: float) -> None:
            on_body(piece, now_s)
            if num_events := piece.count(b"data:"):
                self.arrivals.append(Arrival(now_s, num_events))
                self._num_missing -= num_events
            if self._num_missing <= 0:
                self.is_calm.set()

        try:
            return await self._pool.post(path, body, on_piece)
        finally:
            self.is_calm.set()

    def record(self, prompt: Prompt) -> RequestRecord:
        """The record of a stream that was cut off: it ends with its last arrival."""
        num_tokens = sum(arrival.num_tokens or 0 for arrival in self.arrivals)
        end_s = self.arrivals[-1].at_s
        return RequestRecord(self.sent_s, self.sent_s, end_s, tuple(self.arrivals), prompt.num_tokens, num_tokens)


class Load:
    """A client of one server.

    Raises:
        ServerError: unreachable, or no models.
        RuntimeError: a request failed.
    """

    _seeds = itertools.count(1)

    def __init__(self, url: str, seed: int | None = None) -> None:
        self._url, self._seed = url, next(self._seeds) if seed is None else seed
        self._is_warm = False

    async def __aenter__(self) -> Self:
        self._server, self._pool = Server(self._url, {}), ConnectionPool(self._url, {})
        model = str((await self._server.models())[0]["id"])
        self._prompts = TokenPrompts(await self._server.ordinary_token_ids(model), self._seed)
        self._target = Target(model=model, endpoint="completions", timeout_s=_TIMEOUT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.close()
        await self._server.close()

    async def answer(self, num_input_tokens: int, num_output_tokens: int) -> RequestRecord:
        """Send one request and wait for its whole answer."""
        return await self._send(self._prompts.make(num_input_tokens, num_output_tokens))

    async def closed(self, concurrency: int, num: int, input_tokens: int, output_tokens: int) -> list[RequestRecord]:
        """`num` requests, `concurrency` of them in flight at any time."""
        prompts = [self._prompts.make(input_tokens, output_tokens) for _ in range(num)]
        async with self._quiet(concurrency):
            return await run_closed(lambda prompt, due_s: self._send(prompt), prompts, concurrency)

    async def interfere(
        self,
        num_streams: int,
        arriving_tokens: Sequence[int],
        *,
        stream_input: int,
        stream_output: int,
        calm_tokens: int,
    ) -> Interference:
        """Streams run; when each has `calm_tokens` the arriving prompts are sent at once.

        Streams that still run when the arrived prompts are answered are cut off then. A stream that ended before
        leaves a part of that time without gaps: the caller checks what it got.
        """
        streams = [self._prompts.make(stream_input, stream_output) for _ in range(num_streams)]
        arriving = [self._prompts.make(tokens, 8) for tokens in arriving_tokens]
        async with self._quiet(num_streams + len(arriving)):
            watched = [_Watched(self._pool, calm_tokens) for _ in streams]
            tasks = [asyncio.create_task(self._send(*pair)) for pair in zip(streams, watched, strict=True)]
            await asyncio.gather(*(stream.is_calm.wait() for stream in watched))
            arrived = await asyncio.gather(*map(self._send, arriving))
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        records = [_record_of(*found) for found in zip(ended, watched, streams, strict=True)]
        return Interference(records, list(arrived))

    @asynccontextmanager
    async def _quiet(self, num_connections: int) -> AsyncIterator[None]:
        """A garbage collection of this client would be measured as a gap of every stream."""
        await self._pool.open_idle(num_connections)
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    async def _send(self, prompt: Prompt, pool: _Watched | None = None) -> RequestRecord:
        record = await send(cast(ConnectionPool, pool) if pool else self._pool, self._target, prompt)
        if not record.is_ok:
            raise RuntimeError(f"a request to {self._url} failed: {record.error}")
        return record


def _record_of(end: RequestRecord | BaseException, watched: _Watched, prompt: Prompt) -> RequestRecord:
    if isinstance(end, asyncio.CancelledError):
        return watched.record(prompt)
    if isinstance(end, BaseException):
        raise end
    return end
