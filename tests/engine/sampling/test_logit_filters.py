"""Masks of tokens against transformers' logits processors, one greedy step after the other."""

from __future__ import annotations

import math
import random

import pytest
import torch
from engine_oracle import make_sequence
from transformers import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from pdserve.engine.sampling.sampler import sample

VOCAB, NUM_STEPS = 12, 40
EOS = frozenset({3})


def logits_after(token_ids: list[int], seed: int) -> torch.Tensor:
    """fp32 `[1, VOCAB]`, by the last token alone: greedy output falls into loops that bad words break."""
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1000 * seed + token_ids[-1]))


def greedy(
    prompt: list[int], seed: int, num_earlier: int = 0, earlier: list[int] | None = None, **sampling
) -> list[int]:
    """Our output; the first `num_earlier` tokens came from an earlier attempt."""
    given = (earlier or [])[:num_earlier]
    options = {"num_original_prompt_tokens": len(prompt), "sampling": sampling}
    sequence = make_sequence([*prompt, *given], NUM_STEPS, **options)
    while sequence.next_output_index < NUM_STEPS:
        row = logits_after(sequence.tokens(0, sequence.num_tokens), seed)
        sequence.output_token_ids.append(sample(row, [sequence], EOS)[0].token_id)
    return [*given, *sequence.output_token_ids]


def reference(prompt: list[int], seed: int, processors: list) -> list[int]:
    """transformers' output: its processors on the same logits."""
    ids = list(prompt)
    for _ in range(NUM_STEPS):
        row = logits_after(ids, seed)
        for processor in processors:
            row = processor(torch.tensor([ids]), row)
        ids.append(int(row.argmax()))
    return ids[len(prompt) :]


def words_of(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(4, VOCAB) for _ in range(rng.choice((1, 2, 2, 3, 4)))] for _ in range(rng.randint(1, 6))]


@pytest.mark.parametrize("seed", range(30))
def test_bad_words_are_those_of_transformers(seed: int) -> None:
    words = words_of(random.Random(seed))
    prompt = [0, 1]  # no bad word begins in it: transformers would count the prompt in
    expected = reference(prompt, seed, [NoBadWordsLogitsProcessor(words)])
    got = greedy(prompt, seed, bad_words=tuple(map(tuple, words)))
    assert got == expected
    assert got != greedy(prompt, seed) or not any(
        tuple(got[n : n + len(word)]) == tuple(word) for word in words for n in range(NUM_STEPS)
    )


@pytest.mark.parametrize("seed", range(12))
def test_allowed_ids_are_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    allowed = sorted(rng.sample(range(VOCAB), rng.randint(1, 5)))
    processor = PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1)
    got = greedy([0, 1], seed, allowed_token_ids=tuple(allowed))
    assert got == reference([0, 1], seed, [processor])
    assert set(got) <= set(allowed)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_earlier", [1, 2, 5, 39])
def test_an_attempt_that_continues_another_keeps_to_the_same_words(seed: int, num_earlier: int) -> None:
    words = tuple(map(tuple, words_of(random.Random(seed))))
    whole = greedy([0, 1], seed, bad_words=words)
    assert greedy([0, 1], seed, num_earlier, whole, bad_words=words) == whole


def test_a_bad_word_begins_in_the_output_and_not_in_the_prompt() -> None:
    free = greedy([5], 0)
    assert greedy([5], 0, bad_words=((5, free[0]),))[0] == free[0]


def test_masks_that_leave_no_allowed_id_do_not_count() -> None:
    assert set(greedy([5], 1, allowed_token_ids=(4, 6), bad_words=((4,), (6,)))) <= {4, 6}
    only_stops = {"allowed_token_ids": (3,), "min_tokens": NUM_STEPS, "ignore_eos": False}
    assert set(greedy([5], 1, **only_stops)) == {3}


def test_a_bad_word_and_min_tokens_narrow_the_allowed_ids() -> None:
    assert set(greedy([5], 1, allowed_token_ids=(4, 6, 7), bad_words=((4,),))) <= {6, 7}
    assert set(greedy([5], 1, allowed_token_ids=(3, 7), min_tokens=NUM_STEPS, ignore_eos=False)) == {7}


def test_masked_rows_draw_allowed_tokens_alone_and_leave_their_neighbours_as_they_are() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    drawn = {"temperature": 1.0, "allowed_token_ids": (2, 9)}
    for seed in range(50):
        rows = [make_sequence([5], 8), make_sequence([5], 8, sampling={**drawn, "seed": seed}), make_sequence([6], 8)]
        tokens = [token.token_id for token in sample(logits, rows, EOS)]
        assert tokens[1] in (2, 9)
        assert [tokens[0], tokens[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"logit_bias": {2: -100.0}}])
def test_filters_apply_to_what_is_allowed(filters: dict) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        sampling = {"temperature": 1.5, "seed": seed, "allowed_token_ids": (2, 9, 11), **filters}
        assert sample(logits, [make_sequence([5], 8, sampling=sampling)], EOS)[0].token_id in (2, 9, 11)


def test_log_probabilities_are_the_models_own_whatever_is_masked() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    (token,) = sample(logits, [make_sequence([5], 8, sampling={"allowed_token_ids": (2,), "logprobs": 1})], EOS)
    assert token.token_id == 2
    assert math.isclose(token.logprobs.logprob, float(logits.log_softmax(1)[0, 2]), abs_tol=1e-6)
