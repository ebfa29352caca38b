"""Streams as clients read them: OpenAI's through pauses in every place, and readers that cut at more than a newline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, OpenAI
from stand_in import Service, Step, running, speak

from pdserve.errors import UnavailableError
from pdserve.gateway.generation.request import GenerationRequest
from pdserve.gateway.openai.frontend import FrontendLimits
from pdserve.models.tiny_tokenizer import build_tokenizer

TEXT = "the cat 👍 sat"
IDS = build_tokenizer().encode(TEXT).ids
KEEPALIVE_S, PAUSE_S = 0.02, 0.1
PLACES = {
    "before the first": [0],
    "after the first": [1],
    "in a character": [IDS.index(next(i for i in IDS if i > 127)) if any(i > 127 for i in IDS) else 2],
    "in the middle": [len(IDS) // 2],
    "after the last": [len(IDS)],
    "everywhere": list(range(len(IDS) + 1)),
}


def pausing(places: list[int], ending: Step = "stop") -> Any:
    """Says TEXT, with a pause that brings comments before the tokens with these numbers."""

    def script(request: GenerationRequest, choice: int) -> Iterator[Step]:
        for number in range(len(IDS) + 1):
            if number in places:
                over = asyncio.Event()
                asyncio.get_running_loop().call_later(PAUSE_S, over.set)
                yield over
            if number < len(IDS):
                yield [IDS[number]]
        yield ending

    return script


async def read_chat(service: Service, is_async: bool, **fields: Any) -> tuple[str, list[Any]]:
    more = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    if is_async:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            chunks = [chunk async for chunk in await client.chat.completions.create(**more)]
    else:
        with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            chunks = await asyncio.to_thread(lambda: list(client.chat.completions.create(**more)))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


async def read_completion(service: Service, is_async: bool, **fields: Any) -> tuple[str, list[Any]]:
    more = {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 100, **fields}
    if is_async:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            chunks = [chunk async for chunk in await client.completions.create(**more)]
    else:
        with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            chunks = await asyncio.to_thread(lambda: list(client.completions.create(**more)))
    return "".join(c.choices[0].text for c in chunks if c.choices), chunks


READERS = [read_chat, read_completion]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
async def test_the_official_client_reads_on_through_a_pause(
    tiny_model_dir: Path, places: list[int], read: Any, is_async: bool
) -> None:
    async with running(tiny_model_dir, pausing(places), FrontendLimits(sse_keepalive_s=KEEPALIVE_S)) as service:
        text, chunks = await read(service, is_async, stream_options={"include_usage": True})
        again, _ = await read(service, is_async, n=2)
    assert text == TEXT
    assert chunks[-1].usage.completion_tokens == len(IDS)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len(again) == 2 * len(TEXT)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("read", READERS)
async def test_the_official_client_gets_an_error_after_a_pause_as_that_error(
    tiny_model_dir: Path, read: Any, is_async: bool
) -> None:
    script = pausing([2, len(IDS)], UnavailableError("all workers are gone"))
    async with running(tiny_model_dir, script, FrontendLimits(sse_keepalive_s=KEEPALIVE_S)) as service:
        with pytest.raises(APIError, match="all workers are gone"):
            await read(service, is_async)


async def test_a_pause_sends_comments_and_never_an_empty_event(tiny_model_dir: Path) -> None:
    script, limits = pausing(PLACES["everywhere"]), FrontendLimits(sse_keepalive_s=KEEPALIVE_S)
    async with running(tiny_model_dir, script, limits) as service:
        body = {"prompt": "hi", "stream": True, "max_tokens": 100}
        text = (await service.post("/v1/completions", body)).text
    assert text.count(": keep-alive\n") > len(IDS)
    blocks = [[line for line in block.split("\n") if not line.startswith(":")] for block in text.split("\n\n")[:-1]]
    assert all(len(block) == 2 for block in blocks), blocks


# --- readers that cut lines at more than a newline

CUTS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "text", [f"a{cut}b" for cut in CUTS] + ["".join(CUTS), '\\\u2028\\\\\u2029"\x85\u2027\u202a\x84é']
)
async def test_no_event_has_a_character_that_cuts_lines(tiny_model_dir: Path, text: str, path: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 200}
    if "chat" in path:
        body |= {"logprobs": True, "top_logprobs": 2}
    else:
        body |= {"logprobs": 2}
    events, raw = [], b""
    async with (
        running(tiny_model_dir, speak(text)) as service,
        service.client.stream("POST", path, json=body) as response,
    ):
        async for line in response.aiter_lines():  # cuts wherever str.splitlines does
            raw += line.encode() + b"\n"
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
            else:
                assert line.startswith("id: ") or line in ("", "data: [DONE]"), line
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice["delta"].get("content", "") if "chat" in path else choice["text"] for choice in choices]
    assert "".join(pieces) == text
    assert not any(cut.encode() in raw for cut in CUTS)
