"""Sharing a step among prompts: half for the guaranteed, the rest to the first in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.scheduling.sharing import StepBudget, share_budget, share_or_sit_out
from pdserve.engine.scheduling.step_time import PromptTime

TIME = PromptTime(0.03, 0.002, 1e-6)


def _share(wanted, num_tokens, guaranteed=0):
    return share_budget([(0, tokens) for tokens in wanted], StepBudget(num_tokens), guaranteed)


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=12), st.integers(0, 2048), st.data())
def test_tokens_are_given_away_and_never_exceeded(wanted, num_tokens, data):
    guaranteed = data.draw(st.integers(0, len(wanted) - 1))
    grants = _share(wanted, num_tokens, guaranteed)
    assert sum(grants) == min(num_tokens, sum(wanted))
    assert all(0 <= grant <= tokens for grant, tokens in zip(grants, wanted, strict=True))
    assert grants[guaranteed] >= min(wanted[guaranteed], num_tokens // 2)


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=9), st.floats(0.01, 2.0))
def test_seconds_are_not_exceeded_beyond_the_seniors_smallest_chunk(prompts, seconds):
    grants = share_budget(prompts, StepBudget(100_000, seconds, TIME), 0)
    used_s = sum(TIME.seconds(start, grant) for (start, _), grant in zip(prompts, grants, strict=True))
    assert used_s <= seconds / 2 + max(seconds / 2, TIME.seconds(prompts[0][0], 16)) + 1e-9
    assert grants[0] >= min(16, prompts[0][1]), "it always advances"


def test_a_long_senior_leaves_half_to_the_short_ones():
    assert _share([30, 100, 20_000], 512, guaranteed=2) == [30, 100, 382]
    assert _share([200, 200, 200, 20_000], 512, guaranteed=3) == [200, 56, 0, 256]
    assert _share([20_000], 512) == [512]


def test_a_shorter_long_one_uses_the_other_half():
    assert _share([1000, 20_000], 512, guaranteed=1) == [256, 256]
    assert _share([100, 5000, 5000], 512, guaranteed=1) == [100, 412, 0]


def test_a_deep_chunk_is_smaller_for_its_time():
    shallow = share_budget([(0, 5000)], StepBudget(512, 0.4, TIME), 0)
    deep = share_budget([(8000, 5000)], StepBudget(512, 0.4, TIME), 0)
    assert shallow == [pytest.approx(191, abs=2)]
    assert deep == [pytest.approx(39, abs=2)]


def test_a_long_senior_sits_out_a_step_that_gives_another_its_first_token():
    prompts = [(0, 60), (1000, 9000)]
    assert share_or_sit_out(prompts, StepBudget(512, 0.5, TIME), 1) == (True, [60, 0])
    assert share_or_sit_out(prompts, StepBudget(512), 1) == (False, [60, 452]), "only where time is known"
    sits_out, grants = share_or_sit_out([(0, 400), (1000, 9000)], StepBudget(512, 0.5, TIME), 1)
    assert not sits_out, "the other one would not end in its half either"
    assert min(grants) > 0
    assert share_or_sit_out([(0, 60), (1000, 20)], StepBudget(512, 0.5, TIME), 1) == (False, [60, 20])
