"""A real gateway process on a real bus: it registers, serves, shares its port, drains and withdraws."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import Registry, RegistryView
from pdserve.messages import AnyMessage, Finished, PrefillJob, SequenceTokens, TokenBatch
from pdserve.models.card import ModelCard
from pdserve.registration import Role, WorkerRegistration, WorkerState

SERVICE = "gateway-process"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "stream": True}
SAID = 100


@dataclass
class Gateway:
    """One `pdserve gateway` process."""

    process: asyncio.subprocess.Process
    url: str
    lines: list[str] = field(default_factory=list)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 20)


@asynccontextmanager
async def gateway(redis_url: str, model: Path, *flags: str, **environment: str) -> AsyncIterator[Gateway]:
    """Start it and wait for its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.gateway", "--model", str(model), "--served-model-name", "tiny"),
        *("--redis-url", redis_url, "--service", SERVICE, "--heartbeat-s", "0.2", "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(60):
            async for line in process.stdout:
                lines.append(line.decode())
                if " at http://" in lines[-1]:
                    break
            else:
                pytest.fail("the gateway ended: " + "".join(lines))
        yield Gateway(process, lines[-1].split(" at ")[1].strip(), lines)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        lines.append((await process.stdout.read()).decode())


@dataclass
class OneTokenWorker:
    """A prefill worker that says one token and waits for `gate` before it finishes."""

    bus: Bus
    fingerprint: str
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    jobs: list[PrefillJob] = field(default_factory=list)

    def handle(self, message: AnyMessage) -> None:
        if isinstance(message, PrefillJob):
            self.jobs.append(message)
            if self.gate.is_set():
                self.answer(message)

    def answer(self, job: PrefillJob) -> None:
        stream, key = self.bus.keys.tokens(job.gateway_id), job.key._asdict()
        tokens = SequenceTokens(**key, index=0, token_ids=[SAID])
        self.bus.send(stream, TokenBatch(worker_id="p", generation="g", items=[tokens]))
        self.bus.send(
            stream, Finished(**key, worker_id="p", generation="g", finish_reason="length", num_output_tokens=1)
        )

    def registration(self, role: Role) -> WorkerRegistration:
        return WorkerRegistration(
            worker_id=role.value[0], role=role, generation="g", state=WorkerState.READY, pid=1, url="http://x",
            model="tiny", fingerprint=self.fingerprint, kv_signature="same", block_size=16, num_blocks=100,
            max_model_len=1000, window=10_000,
        )  # fmt: skip


@asynccontextmanager
async def pair(redis_url: str, model: Path) -> AsyncIterator[OneTokenWorker]:
    """A prefill/decode pair as the bus shows it."""
    bus = Bus(redis_url, SERVICE, timeout_s=2)
    await bus.start()
    worker = OneTokenWorker(bus, ModelCard.load(model).fingerprint)
    registry = Registry(bus)
    for role in Role:
        await registry.announce_worker(worker.registration(role), 60)
    reading = asyncio.create_task(StreamReader(bus, bus.keys.inbox("p", "g"), worker.handle).run())
    try:
        yield worker
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await bus.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  the condition is another process's state
            await asyncio.sleep(0.02)


async def is_ready(client: httpx.AsyncClient, url: str) -> bool:
    return (await client.get(f"{url}/ready")).status_code == 200


async def test_a_gateway_serves_through_the_bus_and_drains(redis_url: str, tiny_model_dir: Path) -> None:
    async with (
        pair(redis_url, tiny_model_dir) as worker,
        gateway(redis_url, tiny_model_dir) as process,
        httpx.AsyncClient(timeout=20) as client,
    ):
        await until(lambda: is_ready(client, process.url))
        worker.gate.set()
        first = await client.post(f"{process.url}/v1/chat/completions", json={**BODY, "stream": False})
        assert first.status_code == 200, first.text
        assert first.json()["usage"]["completion_tokens"] == 1
        view = RegistryView(worker.bus, 0.2)
        await view.poll()
        (registration,) = view.gateways.values()
        assert registration.url == process.url
        # A request is counted once its last byte is on its way: the client may be here first.
        counted = 'pd_requests_total{code="200",finish_reason="length",model="tiny"} 1.0'
        await until(lambda: _shows(client, registration.metrics_url, counted))
        assert await _shows(client, registration.metrics_url, 'pd_ttft_stage_seconds_count{stage="frontend"} 1.0')

        worker.gate.clear()
        old = asyncio.create_task(client.post(f"{process.url}/v1/chat/completions", json=BODY))
        await until(lambda: _true(len(worker.jobs) == 2))
        process.process.send_signal(signal.SIGTERM)
        await until(lambda: _status(client, process.url, 503))
        refused = await client.post(f"{process.url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        worker.answer(worker.jobs[1])
        assert (await old).text.rstrip().endswith("data: [DONE]")
        assert await asyncio.wait_for(process.process.wait(), 20) == 0
        fresh = RegistryView(worker.bus, 0.2)
        await fresh.poll()
        assert fresh.gateways == {}


async def _shows(client: httpx.AsyncClient, metrics_url: str, sample: str) -> bool:
    return sample in (await client.get(metrics_url)).text


async def _true(value: bool) -> bool:
    return value


async def _status(client: httpx.AsyncClient, url: str, status: int) -> bool:
    return (await client.get(f"{url}/ready")).status_code == status


async def test_what_outlasts_the_drain_ends_with_an_error(redis_url: str, tiny_model_dir: Path) -> None:
    async with (
        pair(redis_url, tiny_model_dir) as worker,
        gateway(redis_url, tiny_model_dir, "--drain-s", "0.2") as process,
        httpx.AsyncClient(timeout=20) as client,
    ):
        await until(lambda: is_ready(client, process.url))
        stuck = asyncio.create_task(client.post(f"{process.url}/v1/chat/completions", json=BODY))
        await until(lambda: _true(bool(worker.jobs)))
        assert await process.stop() == 0
        response = await stuck
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_gateways_share_a_port_and_keep_their_metrics_apart(redis_url: str, tiny_model_dir: Path) -> None:
    port, own_ports = free_port(), [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        for own in own_ports:
            flags = ("--port", str(port), "--metrics-port", str(own))
            await stack.enter_async_context(gateway(redis_url, tiny_model_dir, *flags))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
        shared = f"http://127.0.0.1:{port}"

        async def names_both() -> bool:
            response = await client.get(f"{shared}/metrics", headers={"connection": "close"})
            return response.status_code == 404 and all(str(own) in response.text for own in own_ports)

        await until(names_both)
        for own in own_ports:
            assert "pd_bus_up 1.0" in (await client.get(f"http://127.0.0.1:{own}/metrics")).text
            assert (await client.get(f"http://127.0.0.1:{own}/v1/models")).status_code == 404
        assert (await client.get(f"{shared}/v1/models")).status_code == 200


async def test_a_taken_port_and_a_bad_setting_are_one_readable_line(redis_url: str, tiny_model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        keys = ("--api-keys-file", "keys.json")  # not checked yet, so it must not pretend to
        never = ("--disaggregation", "never", "--local-prefill", "never")
        cases = [(("--port", str(port)), "in use"), (("--port", "x"), "PORT")]
        for flags, word in [*cases, (keys, "API_KEYS_FILE"), (never, "LOCAL_PREFILL")]:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.gateway", "--model", str(tiny_model_dir)),
                *("--redis-url", redis_url, *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode not in (0, None)
            assert "Traceback" not in errors.decode()
            assert word in errors.decode()
