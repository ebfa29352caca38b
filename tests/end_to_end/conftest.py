"""A whole service per test file, the reference it is compared with, and small clients.

A test module says what it needs in `SERVICE` (arguments of `PrivateService`); the model is the tiny one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.bench.sse import SseParser
from pdserve.local.service import PrivateService
from pdserve.verify.compare import Comparison, Verdict, compare
from pdserve.verify.reference import Reference

sys.path.insert(0, str(Path(__file__).parent))  # lm_eval_environment.py

FAST = {"HEARTBEAT_S": 0.3, "KV_LEASE_S": 3, "HANDOFF_TIMEOUT_S": 3, "PROGRESS_TIMEOUT_S": 4, "NUM_BLOCKS": 1024}
"""Settings under which a test need not wait long for what a real service takes seconds to notice."""


@pytest.fixture(scope="session")
def reference(tiny_model_dir: Path) -> Reference:
    """transformers' own generate for the tiny model."""
    return Reference(tiny_model_dir, num_threads=1)


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Iterator[PrivateService]:
    """The service of this test file."""
    wanted: dict[str, Any] = getattr(request.module, "SERVICE", {})
    settings = FAST | wanted.get("settings", {})
    with PrivateService(tiny_model_dir, **{**wanted, "settings": settings}) as running:
        yield running


@pytest.fixture
def model(tiny_model_dir: Path) -> str:
    """Name of the tiny model in the API."""
    return tiny_model_dir.name


@pytest.fixture
def same(reference: Reference) -> Callable[..., None]:
    """`same(prompt, got, max_tokens)` asserts that greedy tokens are the reference's (ties as verify has them)."""

    def check(prompt: list[int], got: list[int], max_tokens: int) -> None:
        found: Comparison = compare(prompt, got, max_tokens, reference.generate)
        assert found.verdict is not Verdict.MISMATCH, found.detail

    return check


class TokenStream:
    """One streaming completion: token ids as they arrive, and how it ended."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.token_ids: list[int] = []
        self.indices: list[str] = []
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] = {}
        self.is_done = False
        self._parser = SseParser()
        self._chunks = response.iter_raw()

    def read(self, num_tokens: int | None = None) -> list[int]:
        """Read until so many tokens have come in all, or to the end."""
        while num_tokens is None or len(self.token_ids) < num_tokens:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            for data in self._parser.feed(chunk):
                self._take(data)
        return self.token_ids

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """One client for all files: making one reads all certificates, which takes longer than a request."""
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture
def open_stream(service: PrivateService, model: str, http: httpx.Client) -> Callable[..., Any]:
    """`with open_stream(prompt, max_tokens, **body) as stream`: greedy unless the body says otherwise."""

    @contextmanager
    def opened(prompt: list[int], max_tokens: int, headers: dict[str, str] | None = None, **more: Any) -> Iterator[Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}} | more
        with http.stream("POST", f"{service.url}/v1/completions", json=body, headers=headers) as response:
            yield TokenStream(response)

    return opened


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> Any:
    """Wait until `condition()` is true; returns its value."""
    give_up_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)
    return value


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., Any]:
    """`wait_for(condition, timeout_s, what)`, for tests that cannot import this module."""
    return wait_for


@pytest.fixture
def holder_of(service: PrivateService, http: httpx.Client) -> Callable[[str], int | None]:
    """`holder_of(role)`: number of the worker of this role that holds an attempt now; None when none does."""

    def find(role: str) -> int | None:
        for process in service.workers:
            if process.role == role and process.pid is not None:
                attempts = http.get(f"{process.url}/debug/requests", timeout=5).json()
                if any(attempt["phase"] not in ("finished", "waiting") for attempt in attempts):
                    return process.index
        return None

    return find
