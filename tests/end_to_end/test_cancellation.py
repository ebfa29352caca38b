"""Clients that go away at any moment: nothing stays held, in no worker and not on the bus."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis

from pdserve.local.service import PrivateService, held_blocks

SERVICE = {"settings": {"KV_LEASE_S": 2, "HEARTBEAT_S": 0.3, "NUM_BLOCKS": 768}}
NUM_REQUESTS = 1000
CONCURRENCY = 40


def random_body(draw: random.Random, model: str, max_prompt: int = 400) -> dict[str, Any]:
    prompt = [draw.randrange(10, 250) for _ in range(draw.choice((1, 15, 16, 17, 60, draw.randint(1, max_prompt))))]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": draw.choice((1, 2, 30, 150)),
        "n": draw.choice((1, 1, 1, 2)),
        "stream": draw.random() < 0.7,
        "ignore_eos": True,
        "temperature": draw.choice((0, 1)),
    }


async def ask_and_leave(client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> str:
    """Send a request and go away at a random point; some stay to the end."""
    patience_s = None if draw.random() < 0.1 else draw.choice((0.0, 0.005, 0.02, 0.1, 0.4)) * draw.random()
    try:
        async with asyncio.timeout(patience_s):
            if not body["stream"]:
                response = await client.post("/v1/completions", json=body)
                return str(response.status_code)
            max_chunks = draw.choice((1, 3, 20, 10**6))
            async with client.stream("POST", "/v1/completions", json=body) as response:
                num_chunks = 0
                async for _ in response.aiter_raw():
                    num_chunks += 1
                    if num_chunks >= max_chunks:
                        return "left"
                return str(response.status_code)
    except TimeoutError:
        return "left"


async def storm(url: str, model: str, num_requests: int) -> dict[str, int]:
    draw = random.Random(0)
    gate, outcomes = asyncio.Semaphore(CONCURRENCY), dict[str, int]()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=CONCURRENCY)) as client:

        async def one() -> None:
            async with gate:
                outcome = await ask_and_leave(client, random_body(draw, model), draw)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

        async with asyncio.TaskGroup() as group:
            for _ in range(num_requests):
                group.create_task(one())
    return outcomes


def bus_size(url: str) -> tuple[int, int]:
    """(keys, bytes of their values and bookkeeping)."""
    with redis.Redis.from_url(url) as client:
        sizes = [client.memory_usage(key, samples=0) or 0 for key in client.scan_iter()]
        return len(sizes), sum(sizes)


@pytest.mark.alone
def test_closing_one_stream_frees_its_blocks_on_both_sides_within_a_second(
    service: PrivateService, open_stream: Callable[..., Any]
) -> None:
    with open_stream(list(range(10, 210)), 2000, ignore_eos=True) as stream:
        stream.read(5)
        assert service.ledgers()["decode-0"]["by_state"]["owned"] > 0
    closed_s = time.monotonic()
    while any(map(held_blocks, service.ledgers().values())):
        assert time.monotonic() - closed_s < 1.0, service.ledgers()


@pytest.mark.alone
def test_a_client_that_leaves_before_the_first_token_frees_prefill_within_a_second(
    service: PrivateService, model: str
) -> None:
    body = {"model": model, "prompt": list(range(10, 250)) * 12, "max_tokens": 100}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/completions", json=body, timeout=0.05)
    left_s = time.monotonic()
    while any(map(held_blocks, service.ledgers().values())):
        assert time.monotonic() - left_s < 2.0, service.ledgers()


@pytest.mark.alone  # where workers starve, their heartbeats come late and the storm is refused with 503
@pytest.mark.timeout(300)
def test_1000_requests_cancelled_at_random_points_leave_nothing_behind(service: PrivateService, model: str) -> None:
    asyncio.run(storm(service.url, model, 60))  # every stream of the bus exists
    service.wait_until_nothing_is_held(30)
    num_keys, num_bytes = bus_size(service.redis_url)
    outcomes = asyncio.run(storm(service.url, model, NUM_REQUESTS))
    assert sum(outcomes.values()) == NUM_REQUESTS
    assert outcomes.get("200", 0) > 20, outcomes
    assert outcomes["left"] > 300, outcomes
    assert not [code for code in outcomes if code not in ("200", "left", "429")], outcomes
    service.wait_until_nothing_is_held(30)
    give_up_s = time.monotonic() + 15
    while True:
        keys_now, bytes_now = bus_size(service.redis_url)
        if keys_now <= num_keys and bytes_now <= 1.05 * num_bytes:
            break
        assert time.monotonic() < give_up_s, (num_keys, keys_now, num_bytes, bytes_now)
        time.sleep(0.1)
    answer = httpx.post(
        f"{service.url}/v1/completions", json={"model": model, "prompt": [50, 60], "max_tokens": 3}, timeout=30
    )
    assert answer.status_code == 200
