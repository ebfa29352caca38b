"""Hand-offs that go wrong at every stage, and messages that are lost, doubled or out of order.

Whatever happens, a client gets the right answer or a clean error, in bounded time, and no block stays held.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pdserve.faults import MESSAGE_TYPES, STAGES
from pdserve.local.service import PrivateService
from pdserve.verify.ask import Asking, ServiceAnswer, ask_all
from pdserve.verify.prompts import VerifyPrompt

SERVICE: dict[str, Any] = {
    "settings": {"HEARTBEAT_S": 0.4, "KV_LEASE_S": 2, "HANDOFF_TIMEOUT_S": 2, "PROGRESS_TIMEOUT_S": 3},
    "faults": {},
}
MAX_TOKENS = 12
MAX_S = 20.0
"""No case may take longer: hand-off timeout, progress timeout and a repetition, with much to spare."""
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _recovers(service: PrivateService, model: str) -> Iterator[None]:
    """After every case no process has died, a next request works, everything is ready, and nothing is held."""
    yield
    for process in service.processes:
        assert process.pid is not None, f"{process.id} died: {process.last_lines()}"
        service.put_faults(process.role, {}, process.index)
    assert [answer.error for answer in ask(service, model, fresh_prompts())] == [None] * 3
    service.wait_ready(15)
    service.wait_until_nothing_is_held(15)


def fresh_prompts() -> list[VerifyPrompt]:
    """Prompts that no prefix cache knows: shorter than a block, whole blocks, several READs."""
    seed = 10 + 7 * next(_numbers)
    return [
        VerifyPrompt(f"{n} tokens", tuple((seed + 3 * i + i * i % 11) % 240 + 5 for i in range(n)))
        for n in (7, 64, 201)
    ]


def set_faults(service: PrivateService, faults: dict[str, Any], *roles: str) -> None:
    for process in service.processes:
        if process.role in (roles or ("gateway", "prefill", "decode")):
            service.put_faults(process.role, faults, process.index)


def happened(service: PrivateService, kind: str) -> bool:
    """Whether a fault with `times` was taken to its end by some process."""
    for process in service.processes:
        shown = httpx.get(f"{process.url}/debug/faults", timeout=5).json().get(kind, [])
        if any(fault["times_left"] == 0 for fault in (shown if isinstance(shown, list) else [shown])):
            return True
    return False


def ask(service: PrivateService, model: str, prompts: list[VerifyPrompt]) -> list[ServiceAnswer]:
    begun_s = time.monotonic()
    answers = asyncio.run(ask_all(Asking(service.url, model, MAX_TOKENS, len(prompts), ""), prompts))
    assert time.monotonic() - begun_s < MAX_S
    return answers


@pytest.fixture
def check(service: PrivateService, model: str, same: Callable[..., None]) -> Callable[..., None]:
    """Ask; every answer is right, or (where allowed) a clean error."""

    def run(*, may_fail: bool = False) -> None:
        prompts = fresh_prompts()
        for prompt, answer in zip(prompts, ask(service, model, prompts), strict=True):
            if answer.error is not None:
                assert may_fail, f"{prompt.name}: {answer.error}"
                assert answer.error.startswith("HTTP 5"), answer.error
                continue
            same(list(prompt.token_ids), list(answer.token_ids), MAX_TOKENS)

    return run


@pytest.mark.parametrize("stage", STAGES)
def test_a_hand_off_that_fails_once_at_any_stage_still_gives_the_right_answer(
    service: PrivateService, check: Callable[..., None], stage: str
) -> None:
    set_faults(service, {"fail": {"stage": stage, "times": 1}}, "decode")
    check()
    assert happened(service, "fail")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_always_fails_is_right_or_a_clean_error(
    service: PrivateService, check: Callable[..., None], stage: str
) -> None:
    set_faults(service, {"fail": {"stage": stage}}, "decode")
    check(may_fail=True)


@pytest.mark.parametrize("times", [1, None])
def test_corrupted_blocks_never_become_text(
    service: PrivateService, check: Callable[..., None], times: int | None
) -> None:
    set_faults(service, {"corrupt_block": {"times": times} if times else {}})
    check(may_fail=times is None)


def test_a_corrupted_block_is_counted(service: PrivateService, check: Callable[..., None]) -> None:
    def mismatches() -> float:
        text = httpx.get(service.process("decode").metrics_url, timeout=5).text
        lines = [line for line in text.splitlines() if line.startswith("pd_kv_digest_mismatch_total")]
        return sum(float(line.split()[-1]) for line in lines)

    before = mismatches()
    set_faults(service, {"corrupt_block": {"times": 1}})
    check()
    assert mismatches() == before + 1


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "LeaseRenewal": {"pull_delay_s": 1.5},
    "Roster": {"step_delay_s": 0.1},
    "ResendTokens": {"drop": [{"message": "TokenBatch", "times": 1}]},
}
"""What else must happen for a message to be sent at all."""
RARE = {"Cancel", "Failed", "KvFailed", "PromptLogprobs"}
"""Not sent where everything else works and no prompt is scored; see the tests below and test_prompt_logprobs.py."""


@pytest.mark.parametrize("message", [message for message in MESSAGE_TYPES if message not in RARE])
def test_a_lost_message_costs_time_and_no_token(
    service: PrivateService, check: Callable[..., None], message: str
) -> None:
    circumstances = CIRCUMSTANCES.get(message, {})
    drops = [{"message": message, "times": 1}, *circumstances.get("drop", [])]
    set_faults(service, circumstances | {"drop": drops})
    check()
    assert happened(service, "drop")


def test_a_lost_failure_report_costs_time_and_no_token(service: PrivateService, check: Callable[..., None]) -> None:
    set_faults(service, {"drop": {"message": "Failed", "times": 1}, "fail": {"stage": "copy"}})
    check(may_fail=True)


def test_a_lost_cancel_leaves_nothing_behind(service: PrivateService, open_stream: Callable[..., Any]) -> None:
    set_faults(service, {"drop": {"message": "Cancel", "times": 2}, "step_delay_s": 0.02})
    with open_stream(list(range(40, 140)), 1500, ignore_eos=True) as stream:
        stream.read(4)
    service.wait_until_nothing_is_held(10)
    assert happened(service, "drop")


def test_doubled_messages_change_nothing(service: PrivateService, check: Callable[..., None]) -> None:
    set_faults(service, {"duplicate": [{"message": message} for message in MESSAGE_TYPES]})
    check()


@pytest.mark.slow
@pytest.mark.parametrize("message", [message for message in MESSAGE_TYPES if message not in RARE])
def test_a_message_overtaken_by_the_next_changes_nothing(
    service: PrivateService, check: Callable[..., None], message: str
) -> None:
    circumstances = CIRCUMSTANCES.get(message, {})
    set_faults(service, circumstances | {"reorder": {"message": message, "times": 1}})
    check()
    assert happened(service, "reorder")


def test_messages_out_of_order_change_nothing(service: PrivateService, check: Callable[..., None]) -> None:
    set_faults(service, {"reorder": [{"message": message, "times": 2} for message in MESSAGE_TYPES]})
    check()
    assert happened(service, "reorder")


def test_a_slow_pull_is_no_failure(service: PrivateService, check: Callable[..., None]) -> None:
    set_faults(service, {"pull_delay_s": 0.3})
    check()
