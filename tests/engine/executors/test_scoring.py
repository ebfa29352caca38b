"""Prompts are scored as transformers scores them: whole, cached, in chunks, preempted, by every executor."""

from __future__ import annotations

import random

import pytest
import torch
from cpu_models import build, load, stock
from engine_oracle import make_sequence, run_to_end
from recorded_device import RecordedDevice

from pdserve.engine.engine import Engine
from pdserve.engine.executors.fake import FakeExecutor, FakeOptions, hash_token
from pdserve.engine.sequence import Sequence
from pdserve.errors import InvalidRequestError
from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.messages import TokenLogprobs
from pdserve.models.tiny import ARCHITECTURES

TOLERANCE = 1e-3
HAS_CPU_KERNELS = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, vocab_size) for _ in range(length)]


def scored(prompt: list[int], count: int = 3, max_tokens: int = 1, **options: object) -> Sequence:
    return make_sequence(prompt, max_tokens, sampling={"prompt_logprobs": count}, **options)


def told(outputs: list, sequence: Sequence) -> list[TokenLogprobs]:
    return [
        entry for output in outputs for one, entries in output.prompt_logprobs if one is sequence for entry in entries
    ]


def scores_of(engine: Engine, sequence: Sequence) -> list[TokenLogprobs]:
    engine.add(sequence)
    return told(run_to_end(engine), sequence)


@torch.no_grad()
def assert_truth(
    model: torch.nn.Module,
    prompt: list[int],
    entries: list[TokenLogprobs],
    count: int = 3,
    tolerance: float = TOLERANCE,
) -> None:
    """Every token but the first: its log-probability, its rank, and the best alternatives in order."""
    table = model(torch.tensor([prompt])).logits[0].float().log_softmax(1)
    assert len(entries) == len(prompt) - 1
    for row, token_id, entry in zip(table, prompt[1:], entries, strict=False):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=tolerance)
        likelier, as_likely = (row > row[token_id] + tolerance).sum(), (row >= row[token_id] - tolerance).sum()
        assert likelier < entry.rank <= as_likely
        assert entry.top_logprobs == pytest.approx(row.topk(count).values.tolist() if count else [], abs=tolerance)
        assert [float(row[i]) for i in entry.top_token_ids] == pytest.approx(entry.top_logprobs, abs=tolerance)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_scores_prompts_as_transformers_does(arch, load_executor, stock_model, make_engine):
    engine = make_engine(load_executor(arch), max_num_batched_tokens=16)
    for length in (1, 2, 16, 17, 45):
        prompt = prompt_of(length, engine.executor.vocab_size, length)
        assert_truth(stock_model(arch), prompt, scores_of(engine, scored(prompt)))


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_chunks_and_the_prefix_cache_change_nothing(budget, count, load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), max_num_batched_tokens=budget)
    prompt = prompt_of(41, engine.executor.vocab_size)
    engine.add(make_sequence(prompt, 3))
    run_to_end(engine)  # now all of its blocks are cached
    for _ in range(2):
        sequence = scored(prompt, count, max_tokens=3)
        assert_truth(stock_model("llama"), prompt, scores_of(engine, sequence), count)
        assert (sequence.num_cached_tokens, len(sequence.output_token_ids)) == (0, 3)
    plain = make_sequence(prompt, 3)
    engine.add(plain)
    run_to_end(engine)
    assert plain.num_cached_tokens == 40
    assert plain.output_token_ids == sequence.output_token_ids


def test_logits_of_a_step_are_bounded_however_many_prompts_are_scored(load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), max_num_batched_tokens=64)
    engine.scheduler.max_scored_tokens = 12
    rows, run = [], engine.executor.run

    def watched(batch):
        logits = run(batch)
        rows.append(len(logits))
        return logits

    engine.executor.run = watched
    prompts = [prompt_of(length, engine.executor.vocab_size, length) for length in (40, 9, 25, 33)]
    sequences = [scored(prompt) for prompt in prompts]
    neighbours = [make_sequence(prompt_of(30, engine.executor.vocab_size, 99), 12) for _ in range(2)]
    for sequence in [*sequences, *neighbours]:
        engine.add(sequence)
    outputs = run_to_end(engine)
    assert max(rows) <= 12 + len(neighbours)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert_truth(stock_model("llama"), prompt, told(outputs, sequence))
    assert all(len(told(outputs, neighbour)) == 0 for neighbour in neighbours)


def test_a_preempted_prompt_tells_each_score_once(load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), num_blocks=24, max_num_batched_tokens=8, max_num_seqs=4)
    prompts = [prompt_of(length, engine.executor.vocab_size, length) for length in (30, 28, 26)]
    sequences = [scored(prompt, max_tokens=20, arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    outputs = run_to_end(engine)
    assert any(output.preempted for output in outputs), "the pool was meant to be too small"
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert_truth(stock_model("llama"), prompt, told(outputs, sequence))


def test_a_failed_step_is_scored_again(load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), max_num_batched_tokens=8)
    prompt = prompt_of(30, engine.executor.vocab_size)
    sequence, run = scored(prompt), engine.executor.run
    engine.add(sequence)
    outputs = [engine.step()]
    engine.executor.run = lambda batch: (_ for _ in ()).throw(RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine.executor.run = run
    assert_truth(stock_model("llama"), prompt, told([*outputs, *run_to_end(engine)], sequence))


def test_nothing_but_the_prompt_may_fill_the_whole_context(load_executor, stock_model, make_engine):
    engine = make_engine(load_executor("llama"), max_num_batched_tokens=100)
    prompt = prompt_of(engine.executor.max_model_len, engine.executor.vocab_size)
    for is_prefill_only in (True, False):
        sequence = scored(prompt, max_tokens=0, is_prefill_only=is_prefill_only)
        assert_truth(stock_model("llama"), prompt, scores_of(engine, sequence))
        assert sequence.finish_reason is not None
    with pytest.raises(InvalidRequestError, match="context length"):
        engine.add(scored(prompt, max_tokens=1, is_prefill_only=True))


@pytest.mark.parametrize("max_decode_seqs", [0, 16])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_the_cuda_executor_scores_prompts_between_others(arch, max_decode_seqs, load_cuda, stock_model, make_engine):
    executor = load_cuda(arch, RecordedDevice(), max_decode_seqs=max_decode_seqs)
    engine = make_engine(executor, max_num_batched_tokens=20)
    prompts = [prompt_of(length, engine.executor.vocab_size, length) for length in (1, 2, 21, 34)]
    sequences = [scored(prompt, max_tokens=4) for prompt in prompts]
    neighbour = make_sequence(prompt_of(9, engine.executor.vocab_size, 5), 12)
    engine.add(neighbour)
    outputs = [engine.step(), engine.step()]  # it decodes while they are scored
    for sequence in sequences:
        engine.add(sequence)
    outputs += run_to_end(engine)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert_truth(stock_model(arch), prompt, told(outputs, sequence))


@HAS_CPU_KERNELS
@pytest.mark.parametrize(("options", "tolerance"), [
    ({}, 1e-3),
    ({"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}, 0.3),
    ({"quantization": "int8"}, 0.3),
], ids=["fp32", "bf16", "int8"])  # fmt: skip
def test_the_cpu_kernels_score_the_same_whole_in_chunks_and_cached(tmp_path, options, tolerance, make_engine):
    folder = build(tmp_path)
    model, prompt = stock(folder), prompt_of(75, 131)
    expected = None
    for budget in (16, 100, 100):
        engine = make_engine(load(folder, num_blocks=64, **options), num_blocks=64, max_num_batched_tokens=budget)
        engine.add(make_sequence(prompt, 2))
        run_to_end(engine)
        entries = scores_of(engine, scored(prompt))
        expected = expected or entries
        assert entries == expected, "the CPU kernels are deterministic"
    with torch.no_grad():
        truth = model(torch.tensor([prompt])).logits[0].log_softmax(1)
    got = [entry.logprob for entry in expected]
    assert got == pytest.approx(
        [float(row[token]) for row, token in zip(truth, prompt[1:], strict=False)], abs=tolerance
    )


def test_the_fake_executor_scores_its_own_choice_as_certain(make_engine):
    executor = FakeExecutor(
        FakeOptions(),
        vocab_size=97,
        eos_token_ids=frozenset({1}),
        block_size=4,
        max_model_len=128,
        sleep=lambda s: None,
    )
    prompt = [5, 6, 7]
    for _ in range(12):
        prompt.append(hash_token(prompt, 97, frozenset({1})))
    entries = scores_of(make_engine(executor, max_num_batched_tokens=4, max_num_seqs=4), scored(prompt))
    assert [entry.logprob for entry in entries[2:]] == pytest.approx([0.0] * 12, abs=1e-6)
    assert {entry.rank for entry in entries[2:]} == {1}
