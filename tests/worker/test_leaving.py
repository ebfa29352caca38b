"""How worker processes publish late when told to, and how they leave when the bus is gone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdserve.local.service import PrivateService

SETTINGS = {"EXECUTOR": "fake", "HEARTBEAT_S": 0.3, "BUS_TIMEOUT_S": 0.5, "NUM_BLOCKS": 64}


@pytest.fixture
def service(tiny_model_dir: Path) -> Iterator[PrivateService]:
    with PrivateService(tiny_model_dir, settings=SETTINGS, faults={}) as running:
        yield running


async def test_tokens_are_published_late_and_in_order_then_workers_leave_although_the_bus_is_gone(
    service: PrivateService, tiny_model_dir: Path
) -> None:
    async def ask(max_tokens: int) -> tuple[list[int], float]:
        body = {"model": tiny_model_dir.name, "prompt": [5, 6, 7], "max_tokens": max_tokens, "return_token_ids": True}
        began_s = time.monotonic()
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            answer = (await client.post("/v1/completions", json=body | {"temperature": 0})).json()
        return answer["choices"][0]["token_ids"], time.monotonic() - began_s

    for role, max_tokens in (("prefill", 1), ("decode", 20)):
        expected, _ = await ask(max_tokens)
        await asyncio.to_thread(service.put_faults, role, {"publish_delay_s": 0.7})
        token_ids, duration_s = await ask(max_tokens)
        assert (token_ids, len(token_ids)) == (expected, max_tokens)
        assert duration_s > 0.7, role
        await asyncio.to_thread(service.put_faults, role, {})

    service._redis.stop()
    for role in ("prefill", "decode"):
        process = service.process(role).process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 15) == 0, service.process(role).last_lines()
