"""Decode steps rest while a prompt is computed on the same cores, and only then; no token is lost by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

PROMPT_S, STEP_S, INTERVAL_S = 1.5, 0.005, 0.2
SERVICE: dict[str, Any] = {
    "settings": {"EXECUTOR": "fake", "PREFIX_CACHE": False},
    "role_settings": {
        "prefill": {"FAKE_TTFT_S": PROMPT_S},
        "decode": {"FAKE_ITL_S": STEP_S, "STEP_INTERVAL_S": INTERVAL_S},
    },
}


@pytest.mark.alone
def test_steps_are_spaced_exactly_while_another_prompt_is_computed(open_stream: Callable[..., Any]) -> None:
    first_token_s: list[float] = []

    def ask() -> None:
        with open_stream([7] * 40, 2, ignore_eos=True) as other:
            other.read(1)
            first_token_s.append(time.monotonic())
            other.read()

    arrivals_s: list[float] = []
    with open_stream([9] * 40, 600, ignore_eos=True) as running:
        running.read(20)
        thread = threading.Thread(target=ask)
        asked_s = time.monotonic()
        thread.start()
        while running.finish_reason is None:
            running.read(len(running.token_ids) + 1)
            arrivals_s.append(time.monotonic())
    thread.join()
    # The prompt's first 0.3 s are left out: the decode worker hears of it only once it is admitted over there.
    resting = [second for second in arrivals_s if asked_s + 0.3 < second < first_token_s[0]]
    assert 1 <= len(resting) <= (PROMPT_S - 0.3) / INTERVAL_S + 2
    assert len(running.token_ids) == 600
    assert arrivals_s[-1] - arrivals_s[0] < 600 * INTERVAL_S / 4, "it rested when nobody waited"
