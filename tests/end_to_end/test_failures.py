"""Processes that die while a stream runs: it goes on, and no token is lost or doubled."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.local.service import PrivateService

SERVICE: dict[str, Any] = {
    "num": {"prefill": 2, "decode": 2},
    "settings": {"DETERMINISTIC": cpu_ops.why_unavailable() is None, "NUM_BLOCKS": 512},
    "faults": {},
}
PROMPT = list(range(30, 130))


@pytest.fixture(autouse=True)
def _healthy(service: PrivateService) -> Iterator[None]:
    """Every test leaves a service that runs again, without faults, and holds nothing."""
    yield
    for process in service.processes:
        if process.pid is None:
            service.restart(process.role, process.index, wait_s=None)
    service.wait_ready(60)
    for process in service.processes:
        service.put_faults(process.role, {}, process.index)
    service.wait_until_nothing_is_held(20)


def num_redispatches(service: PrivateService) -> float:
    """Of all phases and reasons."""
    text = httpx.get(service.process("gateway").metrics_url, timeout=5).text
    lines = [line for line in text.splitlines() if line.startswith("pd_redispatch_total")]
    assert lines, "the metric is gone"
    return sum(float(line.split()[-1]) for line in lines)


def slow_down(service: PrivateService, role: str, **faults: float) -> None:
    for process in service.workers:
        if process.role == role:
            service.put_faults(role, faults, process.index)


def test_redis_restarted_empty_in_mid_stream_loses_no_token(
    service: PrivateService, open_stream: Callable[..., Any], same: Callable[..., None]
) -> None:
    slow_down(service, "decode", step_delay_s=0.03)
    with open_stream(PROMPT, 80, ignore_eos=True) as stream:
        stream.read(10)
        service.restart_redis()
        got = stream.read()
    assert stream.error is None, stream.error
    assert stream.is_done
    assert (len(got), stream.finish_reason) == (80, "length")
    same(PROMPT, got, 80)


def test_a_decode_worker_killed_in_mid_stream_loses_no_token(
    service: PrivateService, open_stream: Callable[..., Any], holder_of: Callable[..., Any], same: Callable[..., None]
) -> None:
    slow_down(service, "decode", step_delay_s=0.03)
    before = num_redispatches(service)
    with open_stream(PROMPT, 60, ignore_eos=True) as stream:
        stream.read(12)
        index = holder_of("decode")
        assert index is not None
        service.kill("decode", index)
        got = stream.read()
    assert num_redispatches(service) == before + 1
    assert stream.error is None, stream.error
    assert stream.is_done
    assert len(got) == 60
    assert stream.usage["completion_tokens"] == 60
    assert stream.usage["prompt_tokens"] == len(PROMPT)
    same(PROMPT, got, 60)


@pytest.mark.slow
def test_a_seeded_stream_continues_with_the_tokens_it_would_have_had(
    service: PrivateService, open_stream: Callable[..., Any], holder_of: Callable[..., Any]
) -> None:
    sampling = {"temperature": 1.0, "seed": 77, "ignore_eos": True, "presence_penalty": 0.5}
    with open_stream(PROMPT, 50, **sampling) as stream:
        undisturbed = list(stream.read())
    slow_down(service, "decode", step_delay_s=0.03)
    with open_stream(PROMPT, 50, **sampling) as stream:
        stream.read(8)
        service.kill("decode", holder_of("decode"))
        got = stream.read()
    assert stream.error is None, stream.error
    assert got == undisturbed


def test_a_prefill_worker_killed_in_mid_prompt_costs_time_and_nothing_else(
    service: PrivateService,
    open_stream: Callable[..., Any],
    holder_of: Callable[..., Any],
    wait_for: Callable[..., Any],
    same: Callable[..., None],
) -> None:
    slow_down(service, "prefill", prefill_delay_s=1.0)
    prompt = [40 + i % 200 for i in range(1200)]

    def kill() -> None:
        found: list[int] = wait_for(lambda: [i for i in [holder_of("prefill")] if i is not None], 10, "a prefill")
        service.kill("prefill", found[0])

    before = num_redispatches(service)
    killer = threading.Thread(target=kill)
    killer.start()
    with open_stream(prompt, 20, ignore_eos=True) as stream:
        got = stream.read()
    killer.join()
    assert num_redispatches(service) == before + 1
    assert stream.error is None, stream.error
    assert stream.is_done
    assert len(got) == 20
    same(prompt, got, 20)


@pytest.mark.slow
def test_a_decode_worker_frozen_in_mid_stream_is_replaced_and_its_late_tokens_change_nothing(
    service: PrivateService, open_stream: Callable[..., Any], holder_of: Callable[..., Any], same: Callable[..., None]
) -> None:
    slow_down(service, "decode", step_delay_s=0.03)
    with open_stream(PROMPT, 60, ignore_eos=True) as stream:
        stream.read(12)
        index = holder_of("decode")
        assert index is not None
        service.kill("decode", index, signal.SIGSTOP)
        try:
            stream.read(30)
        finally:
            service.kill("decode", index, signal.SIGCONT)
        got = stream.read()
    assert stream.error is None, stream.error
    assert len(got) == 60
    same(PROMPT, got, 60)


@pytest.mark.slow
def test_without_any_decode_worker_a_started_stream_waits_for_one(
    service: PrivateService, open_stream: Callable[..., Any], same: Callable[..., None]
) -> None:
    slow_down(service, "decode", step_delay_s=0.03)
    with open_stream(PROMPT, 40, ignore_eos=True) as stream:
        stream.read(5)
        service.kill("decode", 0)
        service.kill("decode", 1)
        service.restart("decode", 0, wait_s=None)
        got = stream.read()
    assert stream.error is None, stream.error
    assert len(got) == 40
    same(PROMPT, got, 40)
