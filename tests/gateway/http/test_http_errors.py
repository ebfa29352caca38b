"""Bodies that are too large, wrong or slow, and errors of HTTP itself: one shape for all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import running, speak

from pdserve.gateway.generation.request import GenerationRequest
from pdserve.gateway.openai.frontend import FrontendLimits

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}

# --- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}',
        b'{"temperature": 1e999}', b'{"a": "\\ud800"}', b'{"a": "\\udc00x"}', b'{"a": "\xff"}', b"[" * 100_000,
        b'{"a": ' * 5000, b"{'a': 1}", b'{"a": 1,}', b"\xef\xbb\xbf{}", b"[]", b'"text"', b"5", b"null",
    ],
)  # fmt: skip
async def test_what_is_no_json_object_is_a_400(tiny_model_dir: Path, body: bytes) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
async def test_a_body_must_be_declared_as_json(tiny_model_dir: Path, kind: str, status: int) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.client.post(PATH, content=json.dumps(HELLO), headers={"content-type": kind})
    assert response.status_code == status, response.text


async def pieces_of(size: int, num_pieces: int) -> AsyncIterator[bytes]:
    for _ in range(num_pieces):
        yield b" " * size


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_without_keeping_it(tiny_model_dir: Path, is_chunked: bool) -> None:
    size, num_pieces = 1 << 20, 100
    limits = FrontendLimits(max_body_bytes=1 << 20)
    headers = {"content-type": "application/json"}
    if not is_chunked:
        headers["content-length"] = str(size * num_pieces)
    async with running(tiny_model_dir, speak("a"), limits) as service:
        before = resident_bytes()
        response = await service.client.post(PATH, content=pieces_of(size, num_pieces), headers=headers)
        grown = resident_bytes() - before
        fits = await service.client.post(PATH, content=json.dumps(HELLO), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert grown < 20 * size
    assert fits.status_code == 200


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def test_a_body_that_never_comes_is_timed_out(tiny_model_dir: Path) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(1)
        yield b"}"

    async with running(tiny_model_dir, speak("a"), FrontendLimits(body_timeout_s=0.1)) as service:
        response = await service.client.post(PATH, content=slowly(), headers={"content-type": "application/json"})
    assert response.status_code == 408


# --- errors of HTTP itself


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("GET", "/tokenize", 405),
        ("GET", "/v1/chat/completions/", 405),
        ("POST", "/v1/chat/completions//", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("GET", "/debug/faults", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/models/other", 404),
    ],
)
async def test_every_error_has_the_same_shape(tiny_model_dir: Path, method: str, path: str, status: int) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"


async def test_something_unexpected_is_a_500_without_details(tiny_model_dir: Path, caplog: Any) -> None:
    def broken(request: GenerationRequest, choice: int) -> Any:
        raise AssertionError

    async with running(tiny_model_dir, broken) as service:
        service.dispatcher.submit = lambda request: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        response = await service.post(PATH, HELLO)
    assert response.status_code == 500
    assert "ZeroDivisionError" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_a_clients_request_id_is_shown_only_when_short_and_plain(
    tiny_model_dir: Path, given: str, is_kept: bool
) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        headers = [(b"x-request-id", given.encode("latin-1"))]
        response = await service.client.post(PATH, json={**HELLO, "stream": True}, headers=headers)
        (request,) = service.dispatcher.requests
    assert response.headers["x-request-id"] == (given if is_kept else request.request_id)
    assert "x" * 64 not in response.text
    assert request.request_id != given


@pytest.mark.parametrize("depth", [300, 700, 900, 3000])
async def test_what_is_nested_too_deeply_is_never_a_500(tiny_model_dir: Path, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {nested}}}'
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == (200 if depth == 300 else 400), response.text


@pytest.mark.parametrize("where", ["a path", "one header", "many headers"])
async def test_a_head_without_end_closes_the_connection(tiny_model_dir: Path, where: str) -> None:
    piece = {"a path": b"x" * 1024, "one header": b"x" * 1024, "many headers": b"a: " + b"x" * 1000 + b"\r\n"}[where]
    begin = {"a path": b"GET /", "one header": b"GET / HTTP/1.1\r\na: ", "many headers": b"GET / HTTP/1.1\r\n"}[where]
    async with running(tiny_model_dir, speak("a")) as service:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):
                writer.write(piece)
                await writer.drain()
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert (b" 414 " if where == "a path" else b" 431 ") in await reader.read(100)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert (await service.post(PATH, HELLO)).status_code == 200
