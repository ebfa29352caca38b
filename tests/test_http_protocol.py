"""HTTP on bare sockets: offered upgrades, HTTP/1.0, idle connections, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest

from pdserve.http_protocol import MAX_HEAD_BYTES, ConnectionLimits
from pdserve.http_server import HttpServer, listen

BODY = b'{"prompt": "the", "max_tokens": 2}'
WITH_LENGTH = b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers method and body; /stream in pieces of unknown length, /wait after a moment, /early before the body."""
    body, has_more = b"", scope["path"] != "/early"
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    whole = scope["method"].encode() + b" " + body
    if scope["path"] == "/wait":
        await asyncio.sleep(0.1)
    is_stream = scope["path"] == "/stream"
    target = scope["path"].encode() + b"?" + scope["query_string"]
    names = b",".join(sorted(name for name, _ in scope["headers"]))
    headers = [(b"x-target", target), (b"x-headers", names)]
    headers += [] if is_stream else [(b"content-length", b"%d" % len(whole))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if is_stream:
        await send({"type": "http.response.body", "body": whole[:5], "more_body": True})
        whole = whole[5:]
    await send({"type": "http.response.body", "body": whole})


class Connection:
    """One connection, on which answers are read with an independent parser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._parser = h11.Connection(h11.CLIENT)

    async def send(self, *segments: bytes) -> None:
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()
            await asyncio.sleep(0.01)  # a segment of its own

    async def answer(self, method: str = "POST") -> tuple[h11.Response, bytes]:
        """(head, body) of the next answer."""
        if self._parser.our_state is h11.DONE:
            self._parser.start_next_cycle()
        self._parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self._parser.send(h11.EndOfMessage())
        head, body = None, b""
        while True:
            event = self._parser.next_event()
            if event is h11.NEED_DATA:
                self._parser.receive_data(await asyncio.wait_for(self.reader.read(65536), 5))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return head, body

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 5)


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[str, int]]:
    sock = listen("127.0.0.1", 0)
    task = asyncio.create_task(HttpServer(echo, sock, ConnectionLimits(**limits)).run())
    try:
        yield sock.getsockname()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def connected(**limits: float) -> AsyncIterator[Connection]:
    async with serving(**limits) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


# --- offered upgrades

OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "tls": b"Connection: upgrade\r\nUpgrade: TLS/1.0, HTTP/1.1\r\n",
    "two lines": b"Upgrade: h2c\r\nUpgrade: foo/2\r\nConnection: Upgrade\r\nConnection: HTTP2-Settings\r\n",
    "odd case": b"CONNECTION:UPGRADE\r\nUPGRADE:H2C\r\n",
    "no connection header": b"Upgrade: h2c\r\n",
}


def segments_of(head: bytes, body: bytes, how: str) -> Iterator[bytes]:
    if how == "one segment":
        yield head + body
    elif how == "two segments":
        yield from (head + body[: body.index(b"\r\n\r\n") + 4], body[body.index(b"\r\n\r\n") + 4 :])
    else:
        whole = head + body
        yield from (whole[n : n + 7] for n in range(0, len(whole), 7))


@pytest.mark.parametrize("how", ["one segment", "two segments", "many segments"])
@pytest.mark.parametrize("body", [WITH_LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offered_upgrade_is_ignored_and_the_body_is_read(offer: bytes, body: bytes, how: str) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n" + offer
    async with connected() as connection:
        for _ in range(2):
            await connection.send(*segments_of(head, body, how))
            response, got = await connection.answer()
            assert (response.status_code, got) == (200, b"POST " + BODY)
            assert response.http_version == b"1.1"
            assert b"upgrade" not in dict(response.headers)


async def test_pipelined_requests_with_and_without_offers_are_answered_in_order() -> None:
    plain = b"GET / HTTP/1.1\r\nHost: x\r\n"
    offering = b"POST / HTTP/1.1\r\nHost: x\r\n" + OFFERS["h2c"] + WITH_LENGTH
    async with connected() as connection:
        await connection.send(plain + b"\r\n" + offering + plain + OFFERS["websocket"] + b"\r\n" + offering)
        answers = [(await connection.answer())[1] for _ in range(4)]
    assert answers == [b"GET ", b"POST " + BODY, b"GET ", b"POST " + BODY]


async def test_an_offer_with_expect_continue_gets_its_body_asked_for() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" + OFFERS["h2c"]
    async with connected() as connection:
        await connection.send(head + WITH_LENGTH.removesuffix(BODY))
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await connection.send(BODY)
        assert (await connection.answer())[1] == b"POST " + BODY


async def test_an_answer_without_asking_for_the_body_ends_the_connection() -> None:
    async with connected() as connection:
        await connection.send(b"POST /early HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        rest = await connection.rest()
    assert rest.startswith(b"HTTP/1.1 200")
    assert rest.endswith(b"\r\n\r\nPOST ")


@pytest.mark.parametrize("how", ["one segment", "two segments", "many segments"])
async def test_an_answer_before_the_body_has_come_leaves_the_connection_usable(how: str) -> None:
    async with connected() as connection:
        for _ in range(2):
            await connection.send(*segments_of(b"POST /early HTTP/1.1\r\nHost: x\r\n", WITH_LENGTH, how))
            assert (await connection.answer())[1] == b"POST "


# --- heads and trailers


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a?b=c", "/a?b=c"), (b"http://example.org:80/a?b", "/a?b"), (b"http://example.org", "/"), (b"*", "*?"),
        (b"http://example.org?a", "/?a"), (b"https://[::1]/a%20b", "/a b"), (b"//a", "//a"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("offer", [b"", OFFERS["h2c"]])
async def test_a_target_is_read_in_each_form(target: bytes, path: str, offer: bytes) -> None:
    async with connected() as connection:
        await connection.send(b"OPTIONS %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (target, offer))
        response, _ = await connection.answer()
    assert dict(response.headers)[b"x-target"].decode().rstrip("?") == path.rstrip("?")


async def test_trailers_are_no_headers() -> None:
    trailing = CHUNKED.removesuffix(b"\r\n") + b"Content-Encoding: gzip\r\nX-Late: 1\r\n\r\n"
    async with connected() as connection:
        for _ in range(2):
            await connection.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + trailing)
            response, body = await connection.answer()
            assert body == b"POST " + BODY
            assert dict(response.headers)[b"x-headers"] == b"host,transfer-encoding"


# --- HTTP/1.0


@pytest.mark.parametrize("extra", [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n", OFFERS["h2c"]])
async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(extra: bytes) -> None:
    async with connected() as connection:
        await connection.send(b"POST /stream HTTP/1.0\r\n" + extra + WITH_LENGTH)
        head, _, body = (await connection.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert body == b"POST " + BODY


@pytest.mark.parametrize(("asked", "is_kept"), [(b"", False), (b"Connection: keep-alive\r\n", True)])
async def test_http_1_0_keeps_the_connection_when_it_asks_and_the_length_is_known(asked: bytes, is_kept: bool) -> None:
    async with connected() as connection:
        for _ in range(1 + is_kept):
            await connection.send(b"POST / HTTP/1.0\r\n" + asked + WITH_LENGTH)
            response, body = await connection.answer()
            assert (response.status_code, body) == (200, b"POST " + BODY)
            assert dict(response.headers)[b"connection"] == (b"keep-alive" if is_kept else b"close")
        await connection.send(b"HEAD /stream HTTP/1.0\r\n\r\n")
        rest = await connection.rest()
        assert rest.startswith(b"HTTP/1.1 200") is is_kept
        assert rest.endswith(b"\r\n\r\n") is is_kept


async def test_a_stream_to_http_1_1_has_chunks_and_keeps_the_connection() -> None:
    async with connected() as connection:
        for _ in range(2):
            await connection.send(b"POST /stream HTTP/1.1\r\nHost: x\r\n" + WITH_LENGTH)
            response, body = await connection.answer()
            assert dict(response.headers)[b"transfer-encoding"] == b"chunked"
            assert body == b"POST " + BODY


# --- idle connections


@pytest.mark.parametrize("path", [b"/", b"/stream", b"/wait"])
async def test_an_idle_connection_is_kept_for_its_time_and_closed_then(path: bytes) -> None:
    request = b"POST %s HTTP/1.1\r\nHost: x\r\n" % path + WITH_LENGTH
    async with connected(idle_timeout_s=0.5) as connection:
        for _ in range(3):
            await connection.send(request)
            assert (await connection.answer())[1] == b"POST " + BODY
            await asyncio.sleep(0.3)
        started_s = asyncio.get_running_loop().time()
        assert await connection.rest() == b""
        assert asyncio.get_running_loop().time() - started_s < 2


async def test_a_connection_without_any_request_is_closed() -> None:
    async with connected(idle_timeout_s=0.1) as connection:
        assert await connection.rest() == b""


@pytest.mark.parametrize("begin", [b"POST / HT", b"POST / HTTP/1.1\r\nHost: x\r\nA: b\r\n"])
async def test_a_head_that_does_not_end_in_time_is_a_408(begin: bytes) -> None:
    async with connected(idle_timeout_s=0.2) as connection:
        await connection.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await connection.answer("GET")
        await connection.send(begin)
        assert error_in(await connection.rest()) == (408, "request_timeout")


async def test_a_slow_answer_is_no_idle_connection() -> None:
    async with connected(idle_timeout_s=0.03) as connection:
        await connection.send(b"POST /wait HTTP/1.1\r\nHost: x\r\n" + WITH_LENGTH)
        assert (await connection.answer())[1] == b"POST " + BODY


# --- what is no HTTP


def error_in(received: bytes) -> tuple[int, str]:
    """(status, code) of the only answer in there; its body has the shape of all errors."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert "content-type: application/json" in lines
    assert "connection: close" in lines
    assert f"content-length: {len(body)}" in lines
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    return int(lines[0].split()[1]), error["code"]


WRONG = {
    "nonsense": (b"hello there\r\n\r\n", 400, "bad_request"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
    "unknown method": (b"BREW / HTTP/1.1\r\n\r\n", 400, "bad_request"),
    "version": (b"GET / HTTP/9.9\r\n\r\n", 400, "bad_request"),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
    "url": (b"GET /\xff HTTP/1.1\r\n\r\n", 400, "bad_request"),
    "no slash": (b"GET x HTTP/1.1\r\n\r\n", 400, "bad_request"),
    "header": (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, "bad_request"),
    "folded": (b"GET / HTTP/1.1\r\na: b\r\n c\r\n\r\n", 400, "bad_request"),
    "length": (b"POST / HTTP/1.1\r\nContent-Length: 1x\r\n\r\n", 400, "bad_request"),
    "negative": (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "bad_request"),
    "two lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "bad_request"),
    "length and chunks": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\n" + CHUNKED, 400, "bad_request"),
    "offer, length and chunks": (
        b"POST / HTTP/1.1\r\n" + OFFERS["h2c"] + b"Content-Length: 9\r\n" + CHUNKED, 400, "bad_request",
    ),
    "chunk": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "bad_request"),
    "coding": (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400, "bad_request"),
    "proxy": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n", 405, "method_not_allowed"),
    "long url": (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 414, "url_too_long"),
    "endless url": (b"GET /" + b"x" * 2**20, 414, "url_too_long"),
    "long header": (b"GET / HTTP/1.1\r\na: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431, "head_too_large"),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431, "head_too_large"),
    "endless headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200_000, 431, "head_too_large"),
    "long head with an offer": (
        b"POST / HTTP/1.1\r\n" + OFFERS["h2c"] + b"a: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431, "head_too_large",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "status", "code"), WRONG.values(), ids=WRONG)
async def test_what_is_no_http_gets_an_error_of_the_usual_shape(request_: bytes, status: int, code: str) -> None:
    async with connected() as connection:
        await connection.send(request_)
        assert error_in(await connection.rest()) == (status, code)


async def test_a_head_just_below_the_limit_is_served() -> None:
    async with connected() as connection:
        await connection.send(b"GET / HTTP/1.1\r\na: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
        assert (await connection.answer("GET"))[0].status_code == 200


@pytest.mark.parametrize("offer", [b"", OFFERS["h2c"]])
async def test_a_large_body_is_no_large_head(offer: bytes) -> None:
    body = b"x" * 2**20
    async with connected() as connection:
        for _ in range(2):
            await connection.send(b"POST / HTTP/1.1\r\n" + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert (await connection.answer())[1] == b"POST " + body


@pytest.mark.parametrize("path", [b"/", b"/wait", b"/stream"])
async def test_who_is_being_answered_gets_the_whole_answer_before_an_error_ends_the_connection(path: bytes) -> None:
    request = b"POST %s HTTP/1.1\r\nHost: x\r\n" % path + WITH_LENGTH
    async with connected() as connection:
        await connection.send(request + b"nonsense\r\n\r\n")
        response, body = await connection.answer()
        assert (response.status_code, body) == (200, b"POST " + BODY)
        assert dict(response.headers)[b"connection"] == b"close"
        assert await connection.rest() == b""


async def test_a_pipelined_head_that_never_ends_disturbs_no_answer() -> None:
    async with connected(idle_timeout_s=0.03) as connection:
        await connection.send(b"POST /wait HTTP/1.1\r\nHost: x\r\n" + WITH_LENGTH + b"GET / HT")
        assert (await connection.answer())[1] == b"POST " + BODY
        assert await connection.rest() == b""
