"""The step-time model finds the machine's own numbers again, and knows when it does not know."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.scheduling.least_squares import fit_nonnegative, fit_robustly
from pdserve.engine.scheduling.step_time import PromptTime, StepTime, StepTimeModel, StepWork, num_pairs


def _decode(num_sequences, num_context_tokens):
    return StepWork(num_sequences, num_context_tokens)


def _prompt(start, num_tokens, num_sequences=0, num_context_tokens=0):
    return StepWork(num_sequences, num_context_tokens, num_tokens, num_pairs(start, num_tokens))


def test_coefficients_are_found_again_and_never_negative():
    rows = [(1.0, b, k) for b in (1, 4, 9) for k in (10, 5000, 90)]
    fit = fit_nonnegative(rows, [0.03 + 0.004 * b + 6e-6 * k for _, b, k in rows])
    assert fit.coefficients == pytest.approx((0.03, 0.004, 6e-6))
    falling = fit_nonnegative([(1.0, x) for x in (1, 2, 3, 4)], [4.0, 3.0, 2.0, 1.0])
    assert falling.coefficients[1] == 0.0
    assert falling.coefficients[0] > 0


@given(st.integers(0, 10**6))
def test_a_fit_is_never_worse_than_the_mean_and_has_no_negative_coefficient(seed):
    rng = random.Random(seed)
    rows = [(1.0, rng.uniform(0, 9), rng.uniform(0, 9e4)) for _ in range(rng.randrange(1, 30))]
    measured = [rng.uniform(0.01, 3.0) for _ in rows]
    fit = fit_nonnegative(rows, measured)
    assert min(fit.coefficients) >= 0
    constant = fit_nonnegative([(1.0,)] * len(rows), measured)
    assert fit.rms_error <= constant.rms_error * 1.1 + 0.02


def test_columns_that_always_grew_together_are_not_told_apart_by_noise():
    fit = fit_nonnegative([(1.0, 5.0, 50.0)] * 9, [0.05] * 9)
    assert fit.coefficients == pytest.approx((0.05, 0.0, 0.0))


def test_disturbed_measurements_do_not_count():
    rows = [(1.0, float(b)) for b in range(1, 21)]
    measured = [0.03 + 0.004 * b for _, b in rows]
    measured[3] *= 40
    measured[11] *= 15
    assert fit_robustly(rows, measured).coefficients == pytest.approx((0.03, 0.004))


def test_nothing_is_known_before_there_are_enough_steps():
    model = StepTimeModel()
    assert model.fit == StepTime()
    model.note(_decode(1, 10), 0.03)
    model.note(_decode(1, 11), 0.03)
    model.note(_decode(1, 11), 0.0)  # not measured
    assert model.fit.decode is None
    model.note(_decode(1, 12), 0.03)
    assert model.fit.decode is not None
    assert model.fit.decode.seconds(1, 12) == pytest.approx(0.03)
    assert model.fit.prompt is None


def test_few_noisy_steps_never_suggest_an_absurd_price_of_context_or_depth():
    """As on a machine at full load: a warm-up's three prompts, slow at first, and a few uneven decode steps."""
    model = StepTimeModel()
    for num_tokens, duration_s in ((64, 0.9), (16, 0.2), (8, 0.15)):
        model.note(_prompt(0, num_tokens), duration_s)
    for num_context_tokens, duration_s in ((65, 0.1), (66, 0.3), (67, 0.2), (300, 1.0), (301, 0.9)):
        model.note(_decode(1, num_context_tokens), duration_s)
    assert model.fit.prompt is None or model.fit.prompt.pair_s == 0
    assert model.fit.decode is None or model.fit.decode.context_s == model.fit.decode.sequence_s == 0


def test_steps_that_contradict_each_other_are_no_model():
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(64):
        model.note(_decode(rng.randint(1, 9), rng.randint(1, 999)), 10 ** rng.uniform(-3, 1))
    assert model.fit.decode is None


def test_noisy_steps_of_both_kinds_and_mixed_ones_give_the_machines_numbers():
    rng = random.Random(2)
    model = StepTimeModel()

    def seconds(work):
        prompt_s = 0.0022 * work.num_prompt_tokens + 1e-6 * work.num_prompt_pairs
        return 0.03 + 0.004 * work.num_sequences + 6e-6 * work.num_context_tokens + prompt_s

    for _ in range(300):
        num_sequences = rng.randint(1, 16)
        num_context_tokens = num_sequences * rng.randint(10, 900)
        for work in (
            _decode(num_sequences, num_context_tokens),
            _prompt(rng.randint(0, 4000), rng.randint(2, 512), num_sequences, num_context_tokens),
        ):
            model.note(work, seconds(work) * rng.uniform(0.9, 1.1))
    assert model.fit.decode is not None
    assert model.fit.prompt is not None
    assert model.fit.decode.seconds(8, 4000) == pytest.approx(seconds(_decode(8, 4000)), rel=0.1)
    chunk_s = model.fit.prompt.overhead_s + model.fit.prompt.seconds(1000, 128)
    assert chunk_s == pytest.approx(seconds(_prompt(1000, 128)), rel=0.15)


def test_old_steps_are_forgotten():
    model = StepTimeModel()
    for _ in range(100):
        model.note(_decode(4, 400), 0.05)
    for _ in range(80):
        model.note(_decode(4, 400), 0.15)
    assert model.fit.decode is not None
    assert model.fit.decode.seconds(4, 400) == pytest.approx(0.15)


@given(st.integers(0, 30_000), st.floats(1e-3, 100.0), st.floats(1e-6, 0.1), st.floats(0.0, 1e-4))
def test_the_longest_chunk_within_a_time_takes_that_time(start, seconds, token_s, pair_s):
    time = PromptTime(0.0, token_s, pair_s if pair_s > 1e-12 else 0.0)
    num_tokens = time.num_tokens_within(start, seconds)
    assert time.seconds(start, num_tokens) == pytest.approx(seconds, rel=1e-3)
    assert time.num_tokens_within(start, 0.0) == 0
