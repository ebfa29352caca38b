"""Asks the service: token prompts as plain completions, chats as streams, so that both ways to a client are seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from pdserve.bench.sse import SseParser
from pdserve.verify.prompts import VerifyPrompt

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """An answer as a client gets it."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Asking:
    """How a set of prompts is sent."""

    url: str
    model: str
    max_tokens: int
    concurrency: int
    cache_salt: str
    """Prompts with different salts never share KV blocks: a new salt is a cold prefix cache."""
    temperature: float = 0.0
    seed: int | None = None


async def ask_all(
    asking: Asking, prompts: Sequence[VerifyPrompt], on_answer: Callable[[], None] = lambda: None
) -> list[ServiceAnswer]:
    """Answers in the order of the prompts; what goes wrong is in `error`."""
    gate = asyncio.Semaphore(asking.concurrency)
    limits = httpx.Limits(max_connections=asking.concurrency)
    async with httpx.AsyncClient(base_url=asking.url, timeout=_TIMEOUT_S, limits=limits) as client:

        async def ask(prompt: VerifyPrompt) -> ServiceAnswer:
            async with gate:
                answer = await _ask(client, asking, prompt)
            on_answer()
            return answer

        return await asyncio.gather(*map(ask, prompts))


async def _ask(client: httpx.AsyncClient, asking: Asking, prompt: VerifyPrompt) -> ServiceAnswer:
    body: dict[str, Any] = {
        "model": asking.model,
        "temperature": asking.temperature,
        "repetition_penalty": 1,  # whatever the model's generation_config.json says
        "cache_salt": asking.cache_salt,
        "return_token_ids": True,
    }
    body |= {"seed": asking.seed} if asking.seed is not None else {}
    try:
        if prompt.message is None:
            return await _complete(client, body | {"prompt": list(prompt.token_ids), "max_tokens": asking.max_tokens})
        messages = [{"role": "user", "content": prompt.message}]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        chat = body | stream | {"messages": messages, "max_completion_tokens": asking.max_tokens}
        return await _chat(client, chat)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
        return ServiceAnswer(error=f"{type(error).__name__}: {error}")


async def _complete(client: httpx.AsyncClient, body: dict[str, Any]) -> ServiceAnswer:
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return ServiceAnswer(error=f"HTTP {response.status_code}: {response.text[:300]}")
    answer = response.json()
    choice = answer["choices"][0]
    return ServiceAnswer(tuple(choice["token_ids"]), choice["finish_reason"], _cached(answer.get("usage")))


async def _chat(client: httpx.AsyncClient, body: dict[str, Any]) -> ServiceAnswer:
    parser, is_done = SseParser(), False
    token_ids: list[int] = []
    finish_reason, usage = None, None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread())[:300].decode(errors="replace")
            return ServiceAnswer(error=f"HTTP {response.status_code}: {text}")
        async for chunk in response.aiter_raw():
            for data in parser.feed(chunk):
                if data == b"[DONE]":
                    is_done = True
                    continue
                event = json.loads(data)
                if event.get("error"):
                    return ServiceAnswer(tuple(token_ids), error=f"error event: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or []
                    finish_reason = choice.get("finish_reason") or finish_reason
    error = None if is_done else "the stream ended without [DONE]"
    return ServiceAnswer(tuple(token_ids), finish_reason, _cached(usage), error)


def _cached(usage: dict[str, Any] | None) -> int:
    return int(((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
