"""Paths, their spellings and their methods."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from stand_in import running, speak

from pdserve.faults import Faults

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
POSTED = {
    "chat/completions": CHAT,
    "completions": TEXT,
    "tokenize": TEXT,
    "detokenize": {"tokens": [80]},
    "chat/completions/render": CHAT,
}
READ = ["models", "models/tiny", "health", "ready", "version", "metrics", "debug/faults"]


@pytest.mark.parametrize("before", ["/", "/v1/"])
@pytest.mark.parametrize("behind", ["", "/"])
async def test_each_path_has_four_spellings(tiny_model_dir: Path, before: str, behind: str) -> None:
    async with running(tiny_model_dir, speak("a"), faults=Faults({})) as service:
        for path, body in POSTED.items():
            response = await service.post(f"{before}{path}{behind}", body)
            assert response.status_code == 200, (path, response.text)
        stream = await service.post(f"{before}completions{behind}", {**TEXT, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        for path in READ:
            response = await service.client.get(f"{before}{path}{behind}")
            assert response.status_code == 200, (path, response.text)
        models = await service.client.get(f"{before}models{behind}")
        assert [model["id"] for model in models.json()["data"]] == ["tiny"]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "//health", "/health//", "/v1//completions", "/v2/completions", "/v1/v1/completions"]
)
async def test_other_spellings_are_a_404(tiny_model_dir: Path, path: str) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.client.get(service.url + path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "path", [f"{before}{path}{behind}" for path in READ for before in ("/", "/v1/") for behind in ("", "/")]
)
async def test_head_tells_what_get_would_without_a_body(tiny_model_dir: Path, path: str) -> None:
    async with running(tiny_model_dir, speak("a"), faults=Faults({})) as service:
        got, head = await service.client.get(path), await service.client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-length"] == str(len(got.content))
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/models/other", 404), ("/v1/completions", 405)])
async def test_head_of_an_error_has_no_body_and_keeps_the_connection(
    tiny_model_dir: Path, path: str, status: int
) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        head = await service.client.head(path)
        assert (head.status_code, head.content) == (status, b"")
        assert (await service.post("/v1/completions", TEXT)).status_code == 200


ALLOWED = {
    **{f"/v1/{path}": "OPTIONS, POST" for path in POSTED},
    "/completions/": "OPTIONS, POST",
    "/v1/models": "GET, HEAD, OPTIONS",
    "/v1/models/tiny": "GET, HEAD, OPTIONS",
    "/health": "GET, HEAD, OPTIONS",
    "/metrics": "GET, HEAD, OPTIONS",
    "/debug/faults": "GET, HEAD, OPTIONS, PUT",
}


@pytest.mark.parametrize(("path", "allowed"), ALLOWED.items())
async def test_another_method_is_a_405_that_says_which_are_allowed(
    tiny_model_dir: Path, path: str, allowed: str
) -> None:
    async with running(tiny_model_dir, speak("a"), faults=Faults({})) as service:
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE"} - set(allowed.split(", ")):
            response = await service.client.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed), method
            if method != "HEAD":
                assert response.json()["error"]["code"] == "method_not_allowed"
        options = await service.client.options(path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")


async def test_options_of_the_server_itself_are_a_204(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 204 ")
        writer.close()
        await writer.wait_closed()
