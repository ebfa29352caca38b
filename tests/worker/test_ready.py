"""What /ready of a worker says: facts and numbers, from real workers where they can be brought about in a second."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.local.service import PrivateService, held_blocks
from pdserve.readiness import Readiness, ReadyLoad, ReadyReason, read_readiness
from pdserve.worker.ready import worker_readiness

LOAD = ReadyLoad(num_running=3, num_waiting=2, num_used_blocks=40)


def verdict(reason: ReadyReason = ReadyReason.READY, **facts: Any) -> Readiness:
    return worker_readiness(reason, **({"step_problem": None, "transport_problem": None, "load": LOAD} | facts))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ReadyReason.READY),
        ({"reason": ReadyReason.STARTING}, ReadyReason.STARTING),
        ({"reason": ReadyReason.BUS_UNREACHABLE, "transport_problem": "it fails"}, ReadyReason.BUS_UNREACHABLE),
        ({"reason": ReadyReason.DRAINING, "step_problem": "it hangs"}, ReadyReason.DRAINING),
        ({"transport_problem": "the last 6 KV transfers failed"}, ReadyReason.NO_TRANSPORT),
        ({"step_problem": "a step runs for 99 s", "transport_problem": "it fails"}, ReadyReason.STEP_HANGS),
    ],
)
def test_the_reason_that_may_explain_the_others_comes_first(facts: dict[str, Any], reason: ReadyReason) -> None:
    said = verdict(**facts)
    assert (said.reason, said.ready, said.load) == (reason, reason is ReadyReason.READY, LOAD)
    assert said.message.endswith(".")


def test_the_message_carries_the_detail_for_people() -> None:
    assert "the last 6 KV transfers failed" in verdict(transport_problem="the last 6 KV transfers failed").message
    assert "a step runs for 99 s" in verdict(step_problem="a step runs for 99 s").message


@pytest.fixture
def service(tiny_model_dir: Path) -> Iterator[PrivateService]:
    settings = {"EXECUTOR": "fake", "FAKE_ITL_S": 0.05, "HEARTBEAT_S": 0.3, "BUS_TIMEOUT_S": 0.5, "NUM_BLOCKS": 64}
    with PrivateService(tiny_model_dir, settings={**settings, "DRAIN_S": 20}) as running:
        yield running


async def test_a_worker_tells_its_load_and_why_it_is_not_ready(service: PrivateService, tiny_model_dir: Path) -> None:
    url = service.process("decode").url
    body = {"model": tiny_model_dir.name, "prompt": list(range(5, 55)), "max_tokens": 100, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=30) as client:

        async def said() -> tuple[int, Readiness]:
            response = await client.get(f"{url}/ready")
            return response.status_code, read_readiness(response.content)

        async def until(condition: Callable[[Readiness], bool]) -> tuple[int, Readiness]:
            async with asyncio.timeout(20):
                while not condition((now := await said())[1]):  # noqa: ASYNC110  another process's state
                    await asyncio.sleep(0.02)
            return now

        status, idle = await said()
        assert (status, idle.ready, idle.reason, idle.load) == (200, True, ReadyReason.READY, ReadyLoad())
        asking = asyncio.create_task(client.post(f"{service.url}/v1/completions", json=body))
        _, busy = await until(lambda now: now.load.num_running == 1)
        assert 4 <= busy.load.num_used_blocks <= held_blocks(service.ledgers()["decode-0"]) <= 10
        service.process("decode").process.send_signal(signal.SIGTERM)
        status, draining = await until(lambda now: now.reason is not ReadyReason.READY)
        assert (status, draining.ready, draining.reason) == (503, False, ReadyReason.DRAINING)
        assert draining.load.num_running == 1
        assert (await asking).status_code == 200

        url = service.process("prefill").url
        service._redis.stop()
        status, away = await until(lambda now: now.reason is not ReadyReason.READY)
        assert (status, away.ready, away.reason) == (503, False, ReadyReason.BUS_UNREACHABLE)
