"""Clients that leave, stall or wait; a loop that is never blocked; draining, counting and readiness."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from stand_in import Service, events_of, running, speak

from pdserve.errors import UnavailableError
from pdserve.faults import Faults
from pdserve.gateway.counting import GatewayCounting
from pdserve.gateway.generation.request import GenerationRequest
from pdserve.gateway.openai.frontend import FrontendLimits
from pdserve.metrics import GatewayMetrics, labels
from pdserve.readiness import Readiness, ReadyLoad, ReadyReason, read_readiness

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the condition is another task's state
            await asyncio.sleep(0.005)


async def open_request(service: Service, body: dict[str, Any], **socket_options: int) -> socket.socket:
    """Send a request on a bare socket."""
    host, port = service.url.removeprefix("http://").split(":")
    sock = socket.socket()
    for name, value in socket_options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(sock, head.encode() + data)
    return sock


@pytest.mark.alone
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("has_token", [False, True])
async def test_a_client_that_leaves_cancels_at_once(tiny_model_dir: Path, is_stream: bool, has_token: bool) -> None:
    never = asyncio.Event()
    async with running(tiny_model_dir, lambda request, choice: [[80]] * has_token + [never]) as service:
        sock = await open_request(service, {**HELLO, "stream": is_stream})
        await until(lambda: service.dispatcher.requests)
        if is_stream and has_token:
            await asyncio.get_running_loop().sock_recv(sock, 1000)
        left_s = time.monotonic()
        sock.close()
        async with asyncio.timeout(1):
            await service.dispatcher.cancelled.wait()
        assert time.monotonic() - left_s < 1
        assert [reason for _, reason in service.dispatcher.cancels] == ["client"]
        await until(lambda: service.frontend.num_active == 0)
        never.set()


def _with_context(service: Service, num_tokens: int) -> Any:
    return dataclasses.replace(service.frontend.card, max_model_len=num_tokens)


async def test_a_client_that_does_not_read_is_given_up_and_cut_off(tiny_model_dir: Path, caplog: Any) -> None:
    gate, never = asyncio.Event(), asyncio.Event()
    big = list(range(80, 120)) * 5000

    def script(request: GenerationRequest, choice: int) -> list[Any]:
        return [*[big] * 6, gate, [80], never]

    limits = FrontendLimits(client_stall_timeout_s=0.3)
    async with running(tiny_model_dir, script, limits, stream_buffer_bytes=4096, max_total_tokens=10**8) as service:
        service.frontend.card = _with_context(service, 10**8)
        sock = await open_request(service, {**HELLO, "stream": True, "return_token_ids": True}, SO_RCVBUF=4096)
        await until(lambda: service.dispatcher.requests)
        await asyncio.sleep(0.05)
        gate.set()
        async with asyncio.timeout(5):
            await service.dispatcher.cancelled.wait()
        assert [reason for _, reason in service.dispatcher.cancels] == ["slow_client"]
        never.set()
        received = b""
        while piece := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            received += piece
        assert received.startswith(b"HTTP/1.1 200")
        assert not received.endswith(b"0\r\n\r\n")
        sock.close()
    assert "uvicorn" not in caplog.text


async def test_a_long_wait_is_kept_alive_by_comments_after_the_headers(tiny_model_dir: Path) -> None:
    gate = asyncio.Event()
    limits = FrontendLimits(sse_keepalive_s=0.05)
    async with (
        running(tiny_model_dir, lambda request, choice: [gate, [80], "stop"], limits) as service,
        service.client.stream("POST", PATH, json={**HELLO, "stream": True}) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            if text.count(": keep-alive\n") == 2:
                gate.set()
    assert response.status_code == 200
    assert text.startswith(": keep-alive\n: keep-alive\nid: ")
    assert events_of(text)[-1] == "[DONE]"


async def test_a_failure_after_the_first_comment_is_an_event(tiny_model_dir: Path) -> None:
    gate = asyncio.Event()
    limits = FrontendLimits(sse_keepalive_s=0.02)
    script = lambda request, choice: [gate, UnavailableError("nobody is left")]  # noqa: E731
    async with (
        running(tiny_model_dir, script, limits) as service,
        service.client.stream("POST", PATH, json={**HELLO, "stream": True}) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            gate.set()
    assert response.status_code == 200
    (event,) = events_of(text)
    assert event["error"]["message"] == "nobody is left"


async def test_tokens_that_are_ready_together_go_out_in_one_write(tiny_model_dir: Path) -> None:
    gate = asyncio.Event()

    def script(request: GenerationRequest, choice: int) -> list[Any]:
        return [[80], gate, [81], [82], [83], "stop"]

    async with (
        running(tiny_model_dir, script) as service,
        service.client.stream("POST", PATH, json={**HELLO, "stream": True, "n": 3}) as response,
    ):
        pieces = []
        async for piece in response.aiter_raw():
            pieces.append(piece)
            if b"".join(pieces).count(b"assistant") == 3 and not gate.is_set():
                await asyncio.sleep(0.05)
                gate.set()
                num_before = len(pieces)
    assert len(pieces) - num_before <= 3  # the events of all three choices; the last chunk's end


# --- the loop


@pytest.mark.alone
async def test_health_answers_while_huge_prompts_are_encoded(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a"), FrontendLimits(max_body_bytes=64 << 20)) as service:
        content = "the cat and <|im_end|> 雪 " * 30_000
        began_s = time.monotonic()
        huge = asyncio.gather(
            *[service.post(PATH, {"messages": [{"role": "user", "content": content}]}) for _ in range(2)]
        )
        worst_s = 0.0
        while not huge.done():
            started_s = time.monotonic()
            assert (await service.client.get("/health")).status_code == 200
            worst_s = max(worst_s, time.monotonic() - started_s)
        assert [response.status_code for response in await huge] == [400, 400]
    # On the loop one of them alone would be half of it; the slack is for busy machines.
    assert worst_s < max(0.2, (time.monotonic() - began_s) / 4)


async def test_a_draining_gateway_refuses_new_requests_and_finishes_old_ones(tiny_model_dir: Path) -> None:
    gate = asyncio.Event()
    async with running(tiny_model_dir, lambda request, choice: [[80], gate, [81], "stop"]) as service:
        old = asyncio.create_task(service.post(PATH, {**HELLO, "stream": True}))
        await until(lambda: service.dispatcher.requests)
        service.frontend.is_draining = True
        refused = await service.post(PATH, HELLO)
        assert (await service.client.get("/health")).status_code == 200
        assert not old.done()
        gate.set()
        assert events_of((await old).text)[-1] == "[DONE]"
        await asyncio.wait_for(service.frontend.wait_until_idle(), 5)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


async def test_what_the_dispatcher_gives_up_at_shutdown_ends_with_an_error(tiny_model_dir: Path) -> None:
    never = asyncio.Event()
    async with running(tiny_model_dir, lambda request, choice: [[80], never]) as service:
        submit = service.dispatcher.submit
        generations = []

        def keep(request: GenerationRequest) -> Any:
            generations.append(submit(request))
            return generations[-1]

        service.dispatcher.submit = keep  # type: ignore[method-assign]
        streaming = asyncio.create_task(service.post(PATH, {**HELLO, "stream": True}))
        await until(lambda: generations)
        await asyncio.sleep(0.05)
        generations[0].cancel("shutdown")
        *_, last = events_of((await streaming).text)
        never.set()
    assert "shutting down" in last["error"]["message"]


# --- counting


async def test_every_ended_request_is_counted_once_with_its_outcome(tiny_model_dir: Path) -> None:
    registry, never = CollectorRegistry(), asyncio.Event()
    counting = GatewayCounting(GatewayMetrics(registry, model="tiny"))

    def script(request: GenerationRequest, choice: int) -> list[Any]:
        return [never] if request.priority else [[80], [81, 82], "stop"]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    def count(code: str, reason: str) -> float | None:
        return value("pd_requests_total", model="tiny", code=code, finish_reason=reason)

    async with running(tiny_model_dir, script) as service:
        service.frontend.observer = counting
        await service.post(PATH, HELLO)
        await service.post(PATH, {**HELLO, "stream": True, "max_tokens": 2})
        await service.post(PATH, {**HELLO, "temperature": 9})
        sock = await open_request(service, {**HELLO, "priority": 1})
        await until(lambda: len(service.dispatcher.requests) == 3)
        sock.close()
        await until(lambda: service.frontend.num_active == 0)
        never.set()
    assert [count("200", "stop"), count("200", "length"), count("400", "error"), count("499", "cancelled")] == [1] * 4
    assert value("pd_generation_tokens_total") == 5
    assert value("pd_inter_token_latency_seconds_count") == 3
    assert value("pd_time_per_output_token_seconds_count") == 2
    assert value("pd_time_to_first_token_seconds_count") == 2
    assert value("pd_request_duration_seconds_count") == 4
    stages = [value("pd_ttft_stage_seconds_sum", stage=stage) or 0 for stage in labels.TTFT_STAGES]
    assert sum(stages) == pytest.approx(value("pd_time_to_first_token_seconds_sum"))


# --- test hooks


async def test_readiness_follows_the_dispatcher(tiny_model_dir: Path) -> None:
    load = ReadyLoad(num_running=3, num_waiting=2)
    waiting = Readiness(ready=False, reason=ReadyReason.NO_WORKERS, message="No workers.", load=load)
    async with running(tiny_model_dir, speak("a"), readiness=waiting) as service:
        response = await service.client.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert read_readiness(response.content) == waiting
        assert response.json()["error"] == {
            "message": "No workers.", "type": "service_unavailable", "param": None, "code": "no_workers",
        }  # fmt: skip
        service.dispatcher.readiness = Readiness(ready=True, reason=ReadyReason.READY, message="Ready.", load=load)
        response = await service.client.get("/ready")
        assert response.status_code == 200
        assert read_readiness(response.content) == service.dispatcher.readiness


async def test_hooks_exist_only_when_switched_on(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a"), faults=Faults({})) as service:
        put = await service.client.put("/debug/faults", json={"step_delay_s": 0.5})
        bad = await service.client.put("/debug/faults", json={"nonsense": 1})
        got = await service.client.get("/debug/faults")
        headers = {"X-PDServe-Prefill": "p1", "X-PDServe-Decode": "d1"}
        await service.client.post(PATH, json=HELLO, headers=headers)
        (request,) = service.dispatcher.requests
    assert put.json() == got.json() == {"step_delay_s": 0.5}
    assert bad.status_code == 400
    assert (request.pinned_prefill, request.pinned_decode) == ("p1", "d1")
