"""The batch sampler against a plain per-row sampler in numpy, its randomness, and its independence of the batch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from engine_oracle import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampling import draw as draw_module
from pdserve.engine.sampling.draw import draw
from pdserve.engine.sampling.logprobs import MIN_LOGPROB
from pdserve.engine.sampling.philox import philox, uniforms
from pdserve.engine.sampling.sampler import sample

VOCAB = 50
EOS = frozenset({3, 7})


def _plain_distribution(logits, sequence):
    """The documented order of things, one token at a time, in float64."""
    params, row = sequence.sampling, np.asarray(logits, dtype=np.float64).copy()
    everything = sequence.prompt_token_ids + sequence.output_token_ids
    output = everything[sequence.num_original_prompt_tokens :]
    for token_id in range(len(row)):
        if token_id in everything:
            row[token_id] = (
                row[token_id] / params.repetition_penalty
                if row[token_id] > 0
                else row[token_id] * params.repetition_penalty
            )
        if token_id in output:
            row[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
        row[token_id] += params.logit_bias.get(token_id, 0.0)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
        if len(output) < params.min_tokens and token_id in stops:
            row[token_id] = -math.inf
    if params.temperature < 1e-5:
        return (row == row.max()) * 1.0
    row = row / params.temperature
    by_size = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = set(by_size[: params.top_k] if params.top_k > 0 else by_size)
    mass = sum(math.exp(row[i] - row[by_size[0]]) for i in kept)
    before, nucleus = 0.0, set()
    for i in by_size:
        if i in kept and (before < params.top_p or params.top_p >= 1):
            nucleus.add(i)
            before += math.exp(row[i] - row[by_size[0]]) / mass
    likely = {i for i in nucleus if math.exp(row[i] - row[by_size[0]]) >= params.min_p}
    weights = np.array([math.exp(row[i] - row[by_size[0]]) if i in likely else 0.0 for i in range(len(row))])
    return weights / weights.sum()


def _plain_token(logits, sequence, uniform):
    """The first token at which the distribution's sum exceeds the uniform; None when that is too close to tell."""
    total = np.cumsum(_plain_distribution(logits, sequence))
    if sequence.sampling.temperature >= 1e-5 and np.abs(total - uniform).min() < 1e-6:
        return None
    return int(np.argmax(total > uniform))


PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.sampled_from([0.0, 1e-7, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 5, VOCAB, 10**7]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.5]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 1.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "min_tokens": st.sampled_from([0, 4]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (5, 9)]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 100.0]), max_size=3),
    }
)


def _sequences(params_list, rng):
    sequences = []
    for params in params_list:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        original = rng.randrange(1, len(prompt) + 1)
        sequence = make_sequence(
            prompt, 99, num_original_prompt_tokens=original, choice=rng.randrange(3), sampling=dict(params)
        )
        sequence.output_token_ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
        sequences.append(sequence)
    return sequences


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 10**6))
def test_a_mixed_batch_draws_what_a_plain_sampler_draws_row_by_row(params_list, seed):
    rng = random.Random(seed)
    sequences = _sequences(params_list, rng)
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    sampled = sample(logits, sequences, EOS)
    assert torch.equal(logits, before), "the caller's logits were changed"
    for row, (sequence, token) in enumerate(zip(sequences, sampled, strict=True)):
        number = uniforms([sequence.sampling.seed], [sequence.key.choice], [sequence.next_output_index])[0]
        expected = _plain_token(before[row].numpy(), sequence, number)
        assert expected is None or token.token_id == expected
        alone = sample(before[row : row + 1], [sequence], EOS)[0]
        assert alone == token, "the neighbours in the batch changed a row"


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -30.0, 0.2]])
    params = {"temperature": 0.8, "top_p": 0.93, "seed": 11}
    num_draws = 20_000
    sequences = [make_sequence([1], 9, choice=choice, sampling=params) for choice in range(num_draws)]
    tokens = [token.token_id for token in sample(logits.expand(num_draws, 8), sequences, frozenset())]
    expected = _plain_distribution(logits[0], sequences[0]) * num_draws
    counts = np.bincount(tokens, minlength=8)
    assert counts[expected == 0].sum() == 0
    chi_square = (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum()
    assert chi_square < 30  # 5 degrees of freedom: p < 2e-5; the draws are fixed, so this never flickers


def test_greedy_takes_the_lowest_id_of_equals_and_tiny_temperatures_are_greedy():
    logits = torch.zeros(3, VOCAB)
    logits[:, [9, 4, 30]] = 5.0
    sequences = [make_sequence([1], sampling={"temperature": t}) for t in (0.0, 1e-7, 1e-30)]
    assert [token.token_id for token in sample(logits, sequences, EOS)] == [4, 4, 4]


def test_penalties_of_outputs_count_from_the_original_prompt():
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 2.0, 1.9
    first = make_sequence([8, 8, 1], sampling={"presence_penalty": 1.0})
    later_attempt = make_sequence([8, 8, 1, 8], num_original_prompt_tokens=3, sampling={"presence_penalty": 1.0})
    assert sample(logits, [first], EOS)[0].token_id == 8, "tokens of the prompt are not outputs"
    assert sample(logits, [later_attempt], EOS)[0].token_id == 9


def test_min_tokens_holds_back_every_stop_and_an_unknown_id_harms_nobody():
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 7, 5]] = torch.tensor([9.0, 8.0, 7.0])
    logits[0, 20] = 1.0
    options = {"ignore_eos": False, "min_tokens": 2, "stop_token_ids": (5, VOCAB + 100)}
    early = make_sequence([1], sampling=options)
    due = make_sequence([1, 2, 2], num_original_prompt_tokens=1, sampling=options)
    assert [token.token_id for token in sample(logits.expand(2, -1), [early, due], EOS)] == [20, 3]


def test_logprobs_are_the_models_own_finite_and_ordered():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 10] = -math.inf
    sequences = [
        make_sequence([1], sampling={"logprobs": VOCAB, "logit_bias": {10: 100.0}, "temperature": 0.5}),
        make_sequence([1], sampling={"logprobs": 0}),
        make_sequence([1], sampling={"temperature": 1.0}),
    ]
    sampled = sample(logits, sequences, EOS)
    expected = logits.log_softmax(1)
    first = sampled[0].logprobs
    assert first.top_logprobs == sorted(first.top_logprobs, reverse=True)
    assert sorted(first.top_token_ids) == list(range(VOCAB))
    assert first.top_logprobs[-1] == MIN_LOGPROB
    assert all(math.isfinite(value) for value in [first.logprob, *first.top_logprobs])
    assert first.top_logprobs[0] == pytest.approx(float(expected[0].max()), abs=1e-6)
    assert sampled[1].logprobs.top_token_ids == []
    assert sampled[1].logprobs.logprob == pytest.approx(float(expected[1].max()), abs=1e-6)
    assert sampled[2].logprobs is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0, 2, 7, 8, 40]), st.sampled_from([0.2, 0.97, 0.9999, 1.0]))
def test_looking_at_few_candidates_first_changes_nothing(seed, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(5, 400, generator=generator) * 8).round() / 8  # many equals
    logits -= logits.amax(1, keepdim=True)
    numbers = torch.rand(5, dtype=torch.float64, generator=generator)
    filters = {
        "top_k": [top_k, 0, 3, 0, 0],
        "top_p": [top_p, 1.0, top_p, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.1, 0.0, 0.05],
    }
    whole = draw(logits.clone(), numbers, **filters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "CANDIDATES", (8, 64))
        assert torch.equal(draw(logits.clone(), numbers, **filters), whole)


@pytest.mark.parametrize("vocab_size", [1, 50, 256, 300, 1024])
def test_the_whole_distribution_is_inverted_at_its_ends_and_in_between(vocab_size):
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[0, 0] = -math.inf if vocab_size > 1 else 0.0
    numbers = torch.tensor([0.0, 1 - 2**-53, *np.linspace(0.001, 0.999, 500)], dtype=torch.float64)
    off = {"top_k": [0] * 502, "top_p": [1.0] * 502, "min_p": [0.0] * 502}
    drawn = draw((logits - logits.amax()).repeat(502, 1), numbers, **off)
    cumulative = np.cumsum(logits[0].double().softmax(0).numpy())
    expected = np.minimum(np.searchsorted(cumulative, numbers.numpy() * cumulative[-1], side="right"), vocab_size - 1)
    gaps = np.abs(cumulative[None] - numbers.numpy()[:, None]).min(1)
    clear = gaps > 1e-6
    assert (drawn.numpy()[clear] == expected[clear]).all()
    assert clear.sum() > 480 or vocab_size == 1
    assert vocab_size == 1 or drawn.min() >= 1, "a token of probability 0 was drawn"


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    """Known answers of the Random123 distribution."""
    lanes = [tuple(np.array([word], dtype=np.uint64) for word in words) for words in (counter, key)]
    assert tuple(int(word[0]) for word in philox(*lanes)) == expected


def test_uniforms_differ_by_seed_choice_and_index_and_fill_the_interval():
    triples = [(seed, choice, index) for seed in (-5, 0, 2**62) for choice in range(3) for index in range(300)]
    numbers = uniforms(*(list(column) for column in zip(*triples, strict=True)))
    assert len(set(numbers.tolist())) == len(triples)
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.03
