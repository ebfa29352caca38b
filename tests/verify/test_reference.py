from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.verify.compare import Verdict, compare
from pdserve.verify.reference import Reference

PROMPT = [40, 77, 130, 12, 99]


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def test_it_is_greedy_search_by_plain_forward_passes(reference: Reference, tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert list(reference.generate(PROMPT, 12).token_ids) == tokens[len(PROMPT) :]


def test_gaps_are_differences_of_its_own_logits(reference: Reference) -> None:
    answer = reference.generate(PROMPT, 4)
    logits = reference.logits_after([*PROMPT, *answer.token_ids[:2]])
    second = int(logits.topk(2).indices[1])
    assert answer.gap(2, answer.token_ids[2]) == 0.0
    assert answer.gap(2, second) == pytest.approx(float(logits.max() - logits[second]), abs=1e-4)
    assert answer.gap(2, int(logits.argmin())) == float("inf")


def test_a_changed_token_of_a_real_answer_is_found(reference: Reference) -> None:
    right = list(reference.generate(PROMPT, 8).token_ids)
    assert compare(PROMPT, right, 8, reference.generate).verdict is Verdict.EQUAL
    for index in range(8):
        wrong = [*right[:index], (right[index] + 1) % 300, *right[index + 1 :]]
        assert compare(PROMPT, wrong, 8, reference.generate).verdict is Verdict.MISMATCH


def test_an_answer_is_computed_once(reference: Reference) -> None:
    assert not reference.is_known([1, 2, 3], 5)
    answer = reference.generate([1, 2, 3], 5)
    assert reference.is_known([1, 2, 3], 5)
    assert reference.generate([1, 2, 3], 5) is answer


def test_chats_go_through_the_models_template(reference: Reference) -> None:
    ids = reference.chat_token_ids("hello")
    assert ids[0] == 1, "the turn's start token"
    assert len(ids) > len(reference.encode("hello"))
