"""`pdserve up --disaggregation never`, as a user starts it: decode workers do it all, and say what the model says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.local.service_file import LocalProcess, LocalService, read
from pdserve.verify.ask import Asking, ask_all
from pdserve.verify.compare import Verdict, compare
from pdserve.verify.prompts import VerifyPrompt, chat_prompts, token_prompts
from pdserve.verify.reference import Reference

MAX_TOKENS = 12
COMPUTED = 'pd_prefix_cache_tokens_total{result="miss"}'
"""Prompt tokens that a worker computed."""


@pytest.fixture
def up(
    tiny_model_dir: Path, tmp_path: Path, wait_for: Any, request: pytest.FixtureRequest, one_up_at_a_time: None
) -> Iterator[LocalService]:
    """A whole `pdserve up` with the flags of the test."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDS_")}
    flags = ["--model", str(tiny_model_dir), "--port", "0", "--num-blocks", "512", "--drain-s", "1", *request.param]
    with subprocess.Popen(
        [sys.executable, "-m", "pdserve", "up", *flags],
        env=env | {"PDS_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield wait_for(lambda: _ready(tmp_path), 90, "pdserve up")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _ready(home: Path) -> LocalService | None:
    service = read(home, "default")
    is_ready = service is not None and all(process.state == "ready" for process in service.processes)
    return service if is_ready else None


def computed_tokens(process: LocalProcess) -> float:
    text = httpx.get(process.metrics_url, timeout=10).text
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(COMPUTED))


def ask_and_compare(service: LocalService, reference: Reference, prompts: list[VerifyPrompt]) -> None:
    name = httpx.get(f"{service.url}/v1/models", timeout=10).json()["data"][0]["id"]
    answers = asyncio.run(ask_all(Asking(service.url, name, MAX_TOKENS, concurrency=6, cache_salt=""), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None, f"{prompt.name}: {answer.error}"
        found = compare(prompt.token_ids, answer.token_ids, MAX_TOKENS, reference.generate)
        assert found.verdict is not Verdict.MISMATCH, f"{prompt.name}: {found.detail}"


@pytest.mark.parametrize("up", [["--disaggregation", "never"]], indirect=True)
def test_with_never_no_prefill_worker_computes_anything(up: LocalService, reference: Reference) -> None:
    before = {process.id: computed_tokens(process) for process in up.processes if process.role != "gateway"}
    prompts = token_prompts(reference.encode, 20, 200, 16) + chat_prompts(reference.chat_token_ids, 4)
    ask_and_compare(up, reference, prompts)
    computed = {process.id: computed_tokens(process) - before[process.id] for process in up.processes[:2]}
    assert computed["prefill-0"] == 0
    assert computed["decode-0"] > sum(len(prompt.token_ids) for prompt in prompts) / 2, "less what was cached"


@pytest.mark.parametrize("up", [["--disaggregation", "never", "--prefill", "0", "--decode", "2"]], indirect=True)
def test_with_never_no_prefill_worker_is_needed(up: LocalService, reference: Reference) -> None:
    ask_and_compare(up, reference, token_prompts(reference.encode, 8, 100, 16))


@pytest.mark.parametrize("up", [["--min-remote-tokens", "64"]], indirect=True)
def test_with_auto_short_prompts_are_computed_where_they_are_decoded(up: LocalService, reference: Reference) -> None:
    before = {process.id: computed_tokens(process) for process in up.processes if process.role != "gateway"}
    prompts = token_prompts(reference.encode, 16, 200, 16)
    ask_and_compare(up, reference, prompts)
    long = sum(len(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) >= 64)
    short = sum(len(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) < 64)
    assert 0 < computed_tokens(up.processes[0]) - before["prefill-0"] <= long
    assert 0 < computed_tokens(up.processes[1]) - before["decode-0"] <= short
