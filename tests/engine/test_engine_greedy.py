"""Greedy output of the engine equals transformers.generate: chunks, mixes, prefix hits, preemption, every length."""

from __future__ import annotations

import random

import pytest
from engine_oracle import assert_greedy, make_sequence, run_to_end

from pdserve.models.tiny import ARCHITECTURES

BLOCK_SIZE = 4


def _prompts(seed: int, lengths: list[int], vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_prompt_length_around_the_block_size(arch, load_executor, stock_model, make_engine):
    engine = make_engine(load_executor(arch), max_num_batched_tokens=16)
    lengths = list(range(1, 3 * BLOCK_SIZE + 2))
    sequences = [make_sequence(p, 6) for p in _prompts(1, lengths, engine.executor.vocab_size)]
    for sequence in sequences:
        engine.add(sequence)
    run_to_end(engine)
    ties = sum(assert_greedy(stock_model(arch), s.prompt_token_ids, s.output_token_ids) for s in sequences)
    assert ties <= 1
    assert all(s.finish_reason == "length" and len(s.output_token_ids) == 6 for s in sequences)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mixed_batches_in_chunks_under_preemption_and_with_prefix_hits(arch, load_executor, stock_model, make_engine):
    engine = make_engine(load_executor(arch), num_blocks=40, max_num_batched_tokens=23, max_num_seqs=6)
    shared = _prompts(2, [26], engine.executor.vocab_size)[0]
    prompts = _prompts(3, [1, 60, 5, 33, 17, 48, 2], engine.executor.vocab_size)
    prompts += [shared + tail for tail in _prompts(4, [1, 3, 9], engine.executor.vocab_size)] + [
        shared[:24],
        shared[:24],
    ]
    sequences = [make_sequence(prompt, 20, arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    outputs = []
    for sequence in sequences:  # they arrive while others run
        engine.add(sequence)
        outputs.append(engine.step())
    outputs += run_to_end(engine)
    assert sum(len(output.preempted) for output in outputs) > 0, "the pool was meant to be too small"
    assert sum(sequence.num_cached_tokens for sequence in sequences) > 0
    ties = sum(assert_greedy(stock_model(arch), s.prompt_token_ids, s.output_token_ids) for s in sequences)
    assert ties <= 2
    told = {id(s): [] for s in sequences}
    for output in outputs:
        for sequence, token_id, _ in output.tokens:
            told[id(sequence)].append(token_id)
    assert all(told[id(s)] == s.output_token_ids for s in sequences), "a token was told twice, or not at all"
    assert engine.check_integrity().by_state["owned"] == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(prefix_cache, load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), max_num_batched_tokens=16, prefix_cache=prefix_cache)
    sequence = make_sequence(_prompts(5, [100], engine.executor.vocab_size)[0], 4)
    engine.add(sequence)
    outputs = run_to_end(engine)
    assert [output.num_tokens for output in outputs] == [16] * 6 + [4, 1, 1, 1]
    assert sum(sequence in output.progressed for output in outputs) == 7
    assert_greedy(stock_model("llama"), sequence.prompt_token_ids, sequence.output_token_ids)


@pytest.mark.parametrize("length", [BLOCK_SIZE * 3, BLOCK_SIZE * 3 + 1, BLOCK_SIZE * 3 - 1])
def test_the_same_prompt_again_computes_at_most_its_last_block(length, load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("qwen3"))
    prompt = _prompts(6, [length], engine.executor.vocab_size)[0]
    for expected_cached in (0, (length - 1) // BLOCK_SIZE * BLOCK_SIZE):
        sequence = make_sequence(prompt, 5)
        engine.add(sequence)
        outputs = run_to_end(engine)
        assert sequence.num_cached_tokens == expected_cached
        assert outputs[0].num_tokens == length - expected_cached
        assert_greedy(stock_model("qwen3"), prompt, sequence.output_token_ids)
    assert outputs[0].num_tokens <= BLOCK_SIZE


def test_several_choices_of_one_prompt_compute_it_once(load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), max_num_batched_tokens=32)
    prompt = _prompts(7, [41], engine.executor.vocab_size)[0]
    sequences = [make_sequence(prompt, 6, request_id="one", choice=choice) for choice in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    outputs = run_to_end(engine)
    assert [s.num_cached_tokens for s in sequences] == [0, 40, 40, 40]
    assert sum(output.num_tokens for output in outputs) == 41 + 3 * 1 + 4 * 5
    assert len({tuple(s.output_token_ids) for s in sequences}) == 1
    assert_greedy(stock_model("llama"), prompt, sequences[0].output_token_ids)


def test_an_attempt_that_continues_another_gives_the_same_tokens(load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("phi3"))
    prompt = _prompts(8, [19], engine.executor.vocab_size)[0]
    whole = make_sequence(prompt, 12)
    engine.add(whole)
    run_to_end(engine)
    emitted = whole.output_token_ids[:5]
    rest = make_sequence(prompt + emitted, 12, num_original_prompt_tokens=len(prompt))
    engine.add(rest)
    run_to_end(engine)
    assert emitted + rest.output_token_ids == whole.output_token_ids
    assert rest.finish_reason == "length"
