"""Narrow weights and KV against fp32 on text that the model finds likely: what they cost in perplexity."""

from __future__ import annotations

import math
import os
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from cpu_models import build, load, shuffled_blocks, stock, stock_logits, tokens
from transformers import AutoTokenizer

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor
from pdserve.errors import ModelError
from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.models.resolve import home_folder, resolve_model

pytestmark = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))

NUM_TOKENS = 768
VOCAB_SIZE = 131
WINDOW_TOKENS, NUM_WINDOWS = 1024, 2
BF16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
INT8 = {"quantization": "int8", "kv_dtype": torch.bfloat16}
PRECISIONS = {"bf16 KV": ({"kv_dtype": torch.bfloat16}, 1e-4), "bf16": (BF16, 4e-4), "int8": (INT8, 3e-3)}
"""Options, and the most that distributions may diverge, nats: twice what is usual. One bit less costs four times."""
ONE_PER_CENT = 0.01
"""Of perplexity, as a difference of logarithms."""


def _piece(token_ids: list[int], blocks: list[int]) -> SequenceSlice:
    return SequenceSlice(token_ids, 0, blocks, samples=True)


def _surprise(logits: torch.Tensor, token_ids: list[int]) -> float:
    """Logarithm of the perplexity, nats."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).item()


def _divergence(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Kullback-Leibler, nats per token."""
    chances, expected = logits.log_softmax(1), exact.log_softmax(1)
    return torch.nn.functional.kl_div(chances, expected, reduction="batchmean", log_target=True).item()


def _drawn_by(executor: CpuExecutor, count: int) -> list[int]:
    """A text that the model itself draws: its perplexity is far below that of random tokens."""
    generator, token_ids, blocks = torch.Generator().manual_seed(0), [1], list(range(count // 16 + 1))
    while len(token_ids) < count:
        logits = executor.run([SequenceSlice(token_ids[-1:], len(token_ids) - 1, blocks, samples=True)])
        token_ids.append(int(torch.multinomial(logits[0].softmax(0), 1, generator=generator)))
    return token_ids


def test_logits_of_all_tokens_are_those_of_the_stock_model_in_the_order_of_the_batch(tmp_path: Path):
    folder = build(tmp_path)
    executor, blocks, model = load(folder), shuffled_blocks(256), stock(folder)
    texts = [tokens(count, seed=count) for count in (1, 50, 17)]
    batch = [_piece(text, [blocks.pop() for _ in range(4)]) for text in texts]
    logits = executor.logits_of_all_tokens(batch)
    expected = torch.cat([stock_logits(model, text) for text in texts])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(logits[[0, 50, 67]], executor.run(batch))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model, and a text it drew."""
    folder = build(tmp_path_factory.mktemp("drawn"), hidden_size=128, intermediate_size=256)
    return folder, _drawn_by(load(folder), NUM_TOKENS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_narrow_precision_changes_distributions_and_perplexity_little(drawn, precision):
    folder, text = drawn
    options, bound = PRECISIONS[precision]
    batch = [_piece(text, list(range(NUM_TOKENS // 16)))]
    exact = load(folder).logits_of_all_tokens(batch)
    narrow = load(folder, **options).logits_of_all_tokens(batch)
    assert _surprise(exact, text) < math.log(VOCAB_SIZE) - 0.5, "a text that tells nothing"
    assert abs(_surprise(narrow, text) - _surprise(exact, text)) <= ONE_PER_CENT
    assert 0 < _divergence(narrow, exact) <= bound


@pytest.mark.slow
def test_int8_keeps_the_perplexity_of_the_demo_model_within_one_per_cent():
    try:
        folder = resolve_model("demo", home_folder(os.environ), print)
    except ModelError as error:
        pytest.skip(str(error))
    text = "\n\n".join(topics[name] for name in sorted(topics))[:20_000]
    token_ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = [token_ids[i * WINDOW_TOKENS :][:WINDOW_TOKENS] for i in range(NUM_WINDOWS)]
    surprises = []
    for options in ({}, INT8):
        executor, blocks = load(folder, num_blocks=64, **options), list(range(64))
        logits = [executor.logits_of_all_tokens([_piece(window, blocks)]) for window in windows]
        surprises.append(sum(map(_surprise, logits, windows)) / NUM_WINDOWS)
    assert surprises[0] < math.log(20), "a text that the model understands"
    assert 0 < abs(surprises[1] - surprises[0]) <= ONE_PER_CENT
