"""HTTP as real clients speak it to a whole service: curl, Java, bare sockets, and OpenAI's client through a pause."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.local.service import PrivateService

KEEPALIVE_S = 0.1
SERVICE: dict[str, Any] = {
    "num": {"prefill": 1, "decode": 2},
    "settings": {
        "DETERMINISTIC": cpu_ops.why_unavailable() is None,
        "NUM_BLOCKS": 512,
        "SSE_KEEPALIVE_S": KEEPALIVE_S,
    },
    "faults": {},
}
REQUEST: dict[str, Any] = {"prompt": "the of and", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
JSON = ["-H", "content-type: application/json"]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def curl(service: PrivateService) -> Callable[..., tuple[str, bytes]]:
    """`curl(path, *arguments, data=…)` → (head, body) of the answer, which curl has to like."""

    def run(path: str, *arguments: str, data: bytes | None = None) -> tuple[str, bytes]:
        posted = [] if data is None else [*JSON, "--data-binary", "@-"]
        command = ["curl", "-sS", "-i", "--max-time", "30", *posted, *arguments, f"{service.url}{path}"]
        done = subprocess.run(command, input=data, capture_output=True, check=True)
        head, _, body = done.stdout.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
        return head.decode().lower(), body

    return run


@pytest.fixture(scope="module")
def expected(service: PrivateService) -> str:
    """What the service says to REQUEST over plain HTTP/1.1."""
    with connect(service) as connection:
        return text_in(post(connection, REQUEST))


def connect(service: PrivateService) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection(service.url.removeprefix("http://")))


def post(connection: http.client.HTTPConnection, request: dict[str, Any], **headers: str) -> bytes:
    headers["Content-Type"] = "application/json"
    connection.request("POST", "/v1/completions", json.dumps(request), headers)
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, body
    return body


def text_in(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


def streamed_text(body: bytes) -> str:
    events = [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


# --- one test for each way to speak


@needs_curl
@pytest.mark.parametrize("extra", [[], ["-H", "transfer-encoding: chunked"], ["-H", "expect: 100-continue"]])
def test_curl_that_offers_http_2(curl: Any, expected: str, extra: list[str]) -> None:
    head, body = curl("/v1/completions", "--http2", *extra, data=json.dumps(REQUEST).encode())
    assert head.startswith("http/1.1 200")
    assert text_in(body) == expected


@needs_curl
def test_curl_that_speaks_http_1_0(curl: Any, expected: str) -> None:
    data = json.dumps({**REQUEST, "stream": True}).encode()
    head, body = curl("/v1/completions", "--http1.0", "--raw", data=data)
    assert "transfer-encoding" not in head
    assert body.startswith(b"id: ")
    assert streamed_text(body) == expected
    head, body = curl("/v1/completions", "--http1.0", data=json.dumps(REQUEST).encode())
    assert text_in(body) == expected


@needs_curl
@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/models/"])
def test_curl_that_asks_for_the_head_alone(curl: Any, path: str) -> None:
    head, body = curl(path, "--head")
    assert head.startswith("http/1.1 200")
    assert "content-length: " in head
    assert body == b""


@needs_curl
def test_curl_that_compresses(curl: Any, expected: str) -> None:
    data = json.dumps(REQUEST).encode()
    _, body = curl("/v1/completions", "-H", "content-encoding: gzip", data=gzip.compress(data))
    assert text_in(body) == expected
    head, body = curl("/v1/completions", "-H", "content-encoding: br", data=data)
    assert head.startswith("http/1.1 415")
    assert "'br'" in json.loads(body)["error"]["message"]
    head, body = curl("/v1/completions", "-H", "content-encoding: gzip", data=gzip.compress(b" " * (100 << 20)))
    assert head.startswith("http/1.1 413")


@needs_curl
@pytest.mark.parametrize("expect", ["expect: 100-continue", "expect:"])
def test_curl_that_sends_too_much(curl: Any, expect: str) -> None:
    head, body = curl("/v1/completions", "-H", expect, data=b" " * (9 << 20))
    assert head.startswith("http/1.1 413")
    assert json.loads(body)["error"]["code"] == "body_too_large"


@needs_curl
def test_curl_that_sends_chunks(curl: Any, expected: str) -> None:
    data = json.dumps({**REQUEST, "user": "x" * 200_000}).encode()
    _, body = curl("/v1/completions", "-H", "transfer-encoding: chunked", data=data)
    assert text_in(body) == expected


@needs_curl
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
def test_curl_that_sends_a_byte_order_mark(curl: Any, expected: str, encoding: str) -> None:
    _, body = curl("/v1/completions", data=json.dumps(REQUEST).encode(encoding))
    assert text_in(body) == expected


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_connections_that_were_idle_for_60_s(service: PrivateService, expected: str) -> None:
    bodies = {"POST": REQUEST, "stream": {**REQUEST, "stream": True}, "error": {"prompt": 5}, "GET": None, "HEAD": None}
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(service)) for _ in bodies]
        for connection, (name, body) in zip(connections, bodies.items(), strict=True):
            if body is None:
                connection.request(name, "/health")
            else:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read()
        socks = [connection.sock for connection in connections]
        time.sleep(60)  # the idle time is what is tested
        assert [text_in(post(connection, REQUEST)) for connection in connections] == [expected] * len(bodies)
        assert [connection.sock for connection in connections] == socks


JAVA = """
import java.net.URI;
import java.net.http.*;

public class Client {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 2; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(arguments[1])).build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.version() + " " + response.body());
        }
    }
}
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="Java is not installed")
def test_javas_own_client(service: PrivateService, expected: str, tmp_path: Path) -> None:
    source = tmp_path / "Client.java"
    source.write_text(JAVA)
    command = ["java", str(source), f"{service.url}/v1/completions", json.dumps(REQUEST)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["200", "HTTP_1_1"]] * 2
    assert [text_in(line.split(maxsplit=2)[2].encode()) for line in lines] == [expected] * 2


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0", "foo/2, bar"])
@pytest.mark.parametrize("is_split", [False, True])
def test_an_offered_upgrade_leaves_the_connection_usable(
    service: PrivateService, expected: str, offer: str, is_split: bool
) -> None:
    data = json.dumps(REQUEST).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {offer}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        for _ in range(2):
            sock.sendall(head.encode() + (b"" if is_split else data))
            if is_split:
                time.sleep(0.05)  # a segment of its own
                sock.sendall(data)
            response = http.client.HTTPResponse(sock)
            response.begin()
            assert response.status == 200
            assert text_in(response.read()) == expected


# --- OpenAI's client


@pytest.fixture
def _healthy(service: PrivateService) -> Iterator[None]:
    yield
    for process in service.processes:
        if process.pid is None:
            service.restart(process.role, process.index, wait_s=None)
    service.wait_ready(60)
    for process in service.workers:
        service.put_faults(process.role, {}, process.index)
    service.wait_until_nothing_is_held(20)


class Reader:
    """The official client, sync or async, chat or completions: text, and the longest time without any."""

    def __init__(self, url: str, is_async: bool, is_chat: bool) -> None:
        self.text, self.longest_gap_s, self._last_s = "", 0.0, time.monotonic()
        self.options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        self._is_async, self._is_chat = is_async, is_chat

    def read(self, on_token: Callable[[int], None] = lambda _: None, **fields: Any) -> str:
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if self._is_chat else {"prompt": "the of and"}
        more = {"temperature": 0, "max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}, **fields}
        if self._is_async:
            asyncio.run(self._read_async({**prompt, **more}, on_token))
        else:
            with openai.OpenAI(**self.options) as client:
                resource = client.chat.completions if self._is_chat else client.completions
                for chunk in resource.create(**prompt, **more):
                    self._take(chunk, on_token)
        return self.text

    async def _read_async(self, body: dict[str, Any], on_token: Callable[[int], None]) -> None:
        async with openai.AsyncOpenAI(**self.options) as client:
            resource = client.chat.completions if self._is_chat else client.completions
            async for chunk in await resource.create(**body):
                self._take(chunk, on_token)

    def _take(self, chunk: Any, on_token: Callable[[int], None]) -> None:
        now_s = time.monotonic()
        self.longest_gap_s, self._last_s = max(self.longest_gap_s, now_s - self._last_s), now_s
        for choice in chunk.choices:
            text = (choice.delta.content if self._is_chat else choice.text) or ""
            self.text += text
            if text:
                on_token(len(self.text))


@pytest.mark.usefixtures("_healthy")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_the_official_client_reads_on_while_a_request_is_dispatched_again(
    service: PrivateService, model: str, holder_of: Callable[..., Any], is_async: bool, is_chat: bool
) -> None:
    undisturbed = Reader(service.url, is_async, is_chat).read(model=model)
    for process in service.workers:
        if process.role == "decode":
            service.put_faults("decode", {"step_delay_s": 0.03}, process.index)
    killed: list[int] = []

    def kill(num_characters: int) -> None:
        if num_characters > 5 and not killed:
            index = holder_of("decode")
            assert index is not None
            service.kill("decode", index)
            killed.append(index)

    reader = Reader(service.url, is_async, is_chat)
    assert reader.read(kill, model=model) == undisturbed
    assert killed
    assert reader.longest_gap_s > 2 * KEEPALIVE_S  # so that comments came in between
