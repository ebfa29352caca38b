"""Sends one streaming completion and records when its tokens arrived. Step before: load.py decides when.

Works against any OpenAI-compatible server. Tokens are counted from `choices[].token_ids` where the server
sends them (asked for with `return_token_ids`), and from the final `usage`; a server that tells neither
cannot be measured, and that is an error, not a guess.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdserve.bench.connection import ConnectionPool
from pdserve.bench.prompts import Prompt
from pdserve.bench.record import Arrival, RequestRecord
from pdserve.bench.sse import SseParser


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content)))


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of the server with every request, beside prompt and length."""

    model: str
    endpoint: str
    """The endpoint asked, completions or chat."""
    timeout_s: float
    does_ignore_eos: bool = True
    does_ask_token_ids: bool = True
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the endpoint below the base URL."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: Prompt) -> bytes:
        """The JSON body for one prompt."""
        is_chat = self.endpoint == "chat"
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self.temperature,
            "max_completion_tokens" if is_chat else "max_tokens": prompt.num_output_tokens,
        }
        body |= {"messages": [{"role": "user", "content": prompt.text}]} if is_chat else {"prompt": prompt.content}
        body |= {"ignore_eos": True} if self.does_ignore_eos else {}
        body |= {"return_token_ids": True} if self.does_ask_token_ids else {}
        return msgspec.json.encode(body | self.extra_body)


class _Answer:
    """Collects one response body."""

    def __init__(self) -> None:
        self.parser = SseParser()
        self.arrivals: list[Arrival] = []
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False
        self.head = b""

    def on_body(self, piece: bytes, now_s: float) -> None:
        if len(self.head) < 2000:
            self.head += piece[:2000]
        for data in self.parser.feed(piece):
            self._on_event(data, now_s)

    def _on_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _chunk_decoder.decode(data)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"unreadable event: {error}"
            return
        if chunk.error is not None:
            self.error = f"error event: {msgspec.json.encode(chunk.error)[:300].decode(errors='replace')}"
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.token_ids:
                self.arrivals.append(Arrival(now_s, len(choice.token_ids)))
            elif choice.token_ids is None and choice.has_text:
                self.arrivals.append(Arrival(now_s, None))

    def why_failed(self, status: int) -> str | None:
        """Why this is no complete answer, in a few words; None when it is one."""
        if status != 200:
            return f"HTTP {status}: {self.head[:300].decode(errors='replace')}"
        if self.error is not None:
            return self.error
        if not self.is_done:
            return "the stream ended without [DONE]"
        if self.num_output_tokens is None:
            return "the server tells neither usage nor token_ids: tokens cannot be counted"
        return None if self.arrivals else "the stream ended without a token"

    @property
    def num_output_tokens(self) -> int | None:
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        counts = [arrival.num_tokens for arrival in self.arrivals]
        return None if None in counts or not counts else sum(count or 0 for count in counts)


async def send(pool: ConnectionPool, target: Target, prompt: Prompt, scheduled_s: float | None = None) -> RequestRecord:
    """Send one request and wait for its end. Never raises for what the server does: the record has the error."""
    body, answer = target.body(prompt), _Answer()
    sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(target.timeout_s):
            status = await pool.post(target.path, body, answer.on_body)
        error = answer.why_failed(status)
    except TimeoutError:
        error = f"no complete answer within {target.timeout_s:g} s"
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return _record(answer, prompt, sent_s if scheduled_s is None else scheduled_s, sent_s, error)


def _record(answer: _Answer, prompt: Prompt, scheduled_s: float, sent_s: float, error: str | None) -> RequestRecord:
    usage = answer.usage or _Usage(prompt_tokens=prompt.num_tokens)
    details = usage.prompt_tokens_details
    return RequestRecord(
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        end_s=time.perf_counter(),
        arrivals=tuple(answer.arrivals),
        num_prompt_tokens=usage.prompt_tokens,
        num_output_tokens=answer.num_output_tokens or 0,
        num_cached_tokens=(details.cached_tokens or 0) if details else 0,
        finish_reason=answer.finish_reason,
        error=error,
    )
