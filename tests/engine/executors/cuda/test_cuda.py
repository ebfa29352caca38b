"""The CUDA executor's logic, on a CPU: eager kernels in place of Triton's, recorded operations in place of graphs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_oracle import make_sequence, run_to_end
from recorded_device import RecordedDevice
from transformers import AutoModelForCausalLM

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cuda.device import HostDevice
from pdserve.engine.executors.cuda.executor import CudaExecutor, StepBounds
from pdserve.engine.executors.cuda.kernels import eager_kernels
from pdserve.engine.executors.stock.attention_route import ATTENTION_NAME
from pdserve.models.tiny import ARCHITECTURES

TOLERANCE = 2e-4  # logits of the tiny models reach some tens; float32 in another order of summation
FUSED = {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.no_grad()
def test_mixed_batches_over_shuffled_blocks_give_the_logits_of_the_stock_model(arch, load_cuda, stock_model):
    executor, stock = load_cuda(arch), stock_model(arch)
    assert executor.is_fused is (arch in FUSED)
    executor.allocate_kv_cache(64)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(64, generator=generator).tolist()
    texts = [torch.randint(5, executor.vocab_size, (length,), generator=generator).tolist() for length in (50, 7, 33)]
    tables = [[order.pop() for _ in range(14)] for _ in texts]
    computed = [0, 0, 0]
    for chunk in [[20, 7, 1], [1, 0, 9], [28, 0, 22], [1, 0, 1]]:
        batch, expected = [], []
        for index, num_tokens in enumerate(chunk):
            if num_tokens == 0:
                continue
            start, end = computed[index], computed[index] + num_tokens
            samples = index != 1 or end == len(texts[1])
            batch.append(SequenceSlice(texts[index][start:end], start, tables[index], samples))
            computed[index] = end
            if samples:
                expected.append(stock(torch.tensor([texts[index][:end]])).logits[0, -1])
        torch.testing.assert_close(executor.run(batch), torch.stack(expected), atol=TOLERANCE, rtol=TOLERANCE)
    assert computed == [50, 7, 33]


def test_a_step_in_which_nothing_samples_returns_no_rows(load_cuda):
    executor = load_cuda("llama")
    executor.allocate_kv_cache(4)
    assert executor.run([SequenceSlice([5, 6, 7], 0, [2], samples=False)]).shape == (0, executor.vocab_size)
    assert executor.run([SequenceSlice([8], 3, [2], samples=False)]).shape == (0, executor.vocab_size)


@pytest.mark.parametrize("arch", sorted(FUSED))
def test_replayed_decode_steps_equal_those_without_graphs(arch, load_cuda):
    """Every number of sequences, contexts on both sides of a graph's bound, prefills in between."""
    device = RecordedDevice()
    graphed, eager = load_cuda(arch, device, max_decode_seqs=6, max_model_len=1500), load_cuda(arch, max_model_len=1500)
    for executor in (graphed, eager):
        executor.allocate_kv_cache(800)
    assert graphed.num_graphs == device.num_captures == 4 * 2, "1, 2, 4 and 6 sequences; 1024 and 1500 tokens"
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 40, 1019, 1, 17, 8]
    order = torch.randperm(800, generator=generator).tolist()
    tables = [[order.pop() for _ in range(length // 4 + 6)] for length in lengths]
    prompts = [torch.randint(5, graphed.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    for index, prompt in enumerate(prompts):
        batch = [SequenceSlice(prompt, 0, tables[index], samples=True)]
        assert torch.equal(graphed.run(batch), eager.run(batch))
    for step, chosen in enumerate([[0, 1, 2, 3, 4, 5], [5], [2, 0], [1, 3, 4], [0, 1, 2, 3, 4], [2, 5, 1, 0, 3, 4]]):
        batch = [SequenceSlice([7 + step], lengths[index], tables[index], samples=True) for index in chosen]
        torch.testing.assert_close(graphed.run(batch), eager.run(batch), atol=TOLERANCE, rtol=TOLERANCE)
        for index in chosen:
            lengths[index] += 1
    torch.testing.assert_close(graphed.kv_cache, eager.kv_cache, atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_that_fill_a_graph_up_write_nothing(load_cuda):
    executor = load_cuda("llama", RecordedDevice(), max_decode_seqs=4)
    executor.allocate_kv_cache(8)
    assert not executor.kv_cache.any(), "capturing wrote into the KV cache"
    executor.run([SequenceSlice([9], 0, [5], samples=True)])
    executor.run([SequenceSlice([9], 1, [5], True), SequenceSlice([9], 0, [2], True), SequenceSlice([9], 0, [3], True)])
    written = executor.kv_cache.flatten(1).any(1).tolist()
    assert written == [False, False, True, True, False, True, False, False]


def test_logits_of_a_step_outlive_the_next_one(load_cuda):
    executor = load_cuda("llama", RecordedDevice(), max_decode_seqs=2)
    executor.allocate_kv_cache(8)
    first = executor.run([SequenceSlice([9], 0, [5], samples=True)])
    kept = first.clone()
    executor.run([SequenceSlice([30], 0, [1], samples=True)])
    assert torch.equal(first, kept)


def test_greedy_tokens_of_an_engine_are_those_of_transformers(load_cuda, stock_model, make_engine):
    executor = load_cuda("qwen3", RecordedDevice(), max_decode_seqs=16)
    engine, stock = make_engine(executor), stock_model("qwen3")
    sequences = [make_sequence([40 + index + 3 * step for step in range(5 + 9 * index)], 6) for index in range(5)]
    for sequence in sequences:
        engine.add(sequence)
    run_to_end(engine)
    for sequence in sequences:
        tokens = list(sequence.prompt_token_ids)
        with torch.no_grad():
            for _ in range(6):
                tokens.append(int(stock(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert sequence.output_token_ids == tokens[-6:]


def test_merged_weights_exist_once(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), attn_implementation=ATTENTION_NAME).eval()
    layer = model.model.layers[0]
    merged = [weakref.ref(module.weight) for module in (layer.self_attn.q_proj, layer.mlp.up_proj)]
    kept = weakref.ref(layer.self_attn.o_proj.weight)
    executor = CudaExecutor(
        model,
        HostDevice(),
        eager_kernels(),
        kv_dtype=torch.float32,
        block_size=4,
        max_model_len=64,
        bounds=StepBounds(0, 64),
    )
    del model, layer
    gc.collect()
    assert [reference() for reference in merged] == [None, None]
    assert kept() is not None
    assert executor.is_fused


def test_a_model_with_modules_of_its_own_says_why_it_has_no_graphs(load_cuda, caplog):
    executor = load_cuda("gemma2", RecordedDevice(), max_decode_seqs=4)
    executor.allocate_kv_cache(8)
    assert executor.num_graphs == 0
    assert "'gemma2' has modules of its own" in caplog.text
