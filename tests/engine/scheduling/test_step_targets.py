"""How much a step may hold, and who may join it: pure rules over a known step time."""

from __future__ import annotations

import math

import pytest
from engine_oracle import make_sequence

from pdserve.engine.scheduling.admission import HandOffGate
from pdserve.engine.scheduling.step_targets import StepTargets, num_admissible, prompt_budget
from pdserve.engine.scheduling.step_time import DecodeTime, PromptTime, StepTime, StepWork
from pdserve.errors import NoCapacityError

DECODE, PROMPT = DecodeTime(0.03, 0.004, 5e-6), PromptTime(0.04, 0.002, 1e-6)
TIME = StepTime(DECODE, PROMPT)
PREFILL, TPOT = StepTargets(prompt_step_s=0.5), StepTargets(tpot_s=0.1)
NOBODY = StepWork()


def test_a_step_of_prompts_is_cut_to_its_aimed_duration_but_stays_efficient():
    assert prompt_budget(PREFILL, TIME, NOBODY, 512).seconds == pytest.approx(0.46)
    slow = StepTime(None, PromptTime(0.04, 0.02, 0.0))
    assert prompt_budget(PREFILL, slow, NOBODY, 512).seconds == pytest.approx(
        PromptTime(0.04, 0.02, 0.0).seconds(0, 128)
    )
    last_token_of_a_prompt = StepWork(1, 100)
    assert prompt_budget(PREFILL, TIME, last_token_of_a_prompt, 512).seconds == pytest.approx(0.46)


def test_prompt_chunks_beside_decoding_sequences_use_what_the_target_leaves():
    four = StepWork(4, 400)
    budget = prompt_budget(TPOT, TIME, four, 512)
    assert budget.seconds == pytest.approx(0.1 - DECODE.seconds(4, 400) - 0.01)
    crowded = StepWork(30, 30_000)
    assert prompt_budget(TPOT, TIME, crowded, 512).seconds == pytest.approx(DECODE.seconds(30, 30_000) / 2)


def test_nothing_is_cut_without_a_model_or_without_an_aim():
    for targets, time, decodes in (
        (PREFILL, StepTime(), NOBODY),
        (TPOT, StepTime(DECODE, None), StepWork(8, 800)),
        (TPOT, StepTime(None, PROMPT), StepWork(8, 800)),
        (TPOT, TIME, NOBODY),
        (TPOT, StepTime(DECODE, None), NOBODY),
        (StepTargets(), TIME, StepWork(8, 800)),
        (StepTargets(), TIME, NOBODY),
    ):
        budget = prompt_budget(targets, time, decodes, 512)
        assert budget.spend(0, 10_000) == 512


def test_the_number_that_may_join_follows_the_target_and_the_context():
    assert num_admissible(TPOT, DECODE, StepWork(8, 800), 100) == pytest.approx((0.1 - 0.066) / 0.0045)
    assert num_admissible(TPOT, DECODE, StepWork(8, 800), 8000) < 1
    assert num_admissible(TPOT, DECODE, StepWork(18, 1800), 100) < 1


def test_a_sequence_alone_is_always_admitted():
    assert num_admissible(TPOT, DecodeTime(0.09, 0.02, 0.0), NOBODY, 10) == math.inf, "out of reach"
    assert num_admissible(StepTargets(tpot_s=0.034), DECODE, NOBODY, 0) >= 1


def test_everybody_is_admitted_without_a_model_a_target_or_a_known_price_of_one_more():
    crowd = StepWork(60, 60_000)
    assert num_admissible(TPOT, None, crowd, 100) == math.inf
    assert num_admissible(StepTargets(), DECODE, crowd, 100) == math.inf
    assert num_admissible(TPOT, DecodeTime(0.2, 0.0, 0.0), crowd, 100) == math.inf, "out of reach for one alone"
    assert num_admissible(TPOT, DecodeTime(0.05, 0.0, 0.0), StepWork(1, 9), 100) == math.inf


def test_a_refused_hand_off_passes_after_its_waiting_bound_whatever_its_attempt():
    gate, crowd = HandOffGate(TPOT, max_wait_s=10.0), StepWork(30, 3000)

    def ask(now_s, request_id="a", decode_batch=crowd):
        gate.check(make_sequence([5] * 50, request_id=request_id), decode_batch, DECODE, now_s)

    for now_s in (100.0, 103.0, 109.9):
        with pytest.raises(NoCapacityError, match=r"30 sequences decode here.*TPOT_SLO_S=0.1"):
            ask(now_s)
    with pytest.raises(NoCapacityError):
        ask(109.9, "b")
    ask(110.1)
    with pytest.raises(NoCapacityError):
        ask(110.2)  # admitted once; this is another hand-off of the same sequence, later
    ask(110.3, "b", StepWork(2, 200))
    with pytest.raises(NoCapacityError):
        ask(300.0, "b")
    assert len(gate._refused_s) == 1, "those that never came back are forgotten"
