"""What each precision of the CPU executor costs in quality: perplexity, logits and tokens against fp32.

A text is computed in windows that know nothing of each other. Every precision sees the same windows, so that its logits
can be compared row by row with those of fp32, and fp32's with those of plain transformers. The text is the language
reference that every CPython brings along, unless another one is named. None of these figures is a time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from benchmarks.report import Row, at_most, median_row, parser, publish
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor
from pdserve.models.resolve import home_folder, resolve_model

FP32 = "fp32"
PRECISIONS: dict[str, dict[str, Any]] = {
    FP32: {"dtype": torch.float32, "kv_dtype": torch.float32},
    "fp32, KV bf16": {"dtype": torch.float32, "kv_dtype": torch.bfloat16},
    "bf16, KV bf16": {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
    "int8, KV bf16": {"dtype": torch.float32, "kv_dtype": torch.bfloat16, "quantization": "int8"},
}
TARGETS = {"bf16, KV bf16": at_most(0.1), "int8, KV bf16": at_most(1.0)}
"""The most per cent by which each precision may raise the perplexity."""
WINDOW_TOKENS = 1024
MIN_WINDOW_TOKENS = 256
"""Room for a prompt and its output."""
BLOCK_SIZE = 16
OUTPUT_TOKENS = 64
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List the steps for baking bread.",
    "What is the difference between a list and a tuple in Python?",
    "Describe the water cycle to a child.",
    "Write a Python function that reverses a string, and explain it.",
)
_PIECE_ROWS = 128
"""Rows compared at a time: a row is as wide as the vocabulary."""


@dataclass
class Comparison:
    """Sums over rows of logits and the same rows of a reference."""

    num_rows: int = 0
    num_predictions: int = 0
    surprise: float = 0.0
    """Sum of the negative log-likelihoods of the tokens that followed, in nats."""
    divergence: float = 0.0
    """Sum of the Kullback-Leibler divergences from the reference's distribution to this one, in nats."""
    num_same_top: int = 0
    error_sum: float = 0.0
    max_error: float = 0.0
    max_logit: float = 0.0

    def add(self, logits: Tensor, reference: Tensor, token_ids: list[int]) -> None:
        """One window: logits `[num_tokens, vocab_size]`, and the tokens they were computed from."""
        following = torch.tensor([*token_ids[1:], -100])  # nothing follows the last one
        self.num_predictions += len(token_ids) - 1
        for start in range(0, len(token_ids), _PIECE_ROWS):
            piece = slice(start, start + _PIECE_ROWS)
            self._add_rows(logits[piece], reference[piece], following[piece])

    def _add_rows(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        chances, expected = logits.log_softmax(1), reference.log_softmax(1)
        errors = (logits - reference).abs()
        self.num_rows += len(logits)
        self.surprise += torch.nn.functional.nll_loss(chances, following, reduction="sum").item()
        self.divergence += torch.nn.functional.kl_div(chances, expected, reduction="sum", log_target=True).item()
        self.num_same_top += int((logits.argmax(1) == reference.argmax(1)).sum())
        self.error_sum += errors.mean(1).sum().item()
        self.max_error = max(self.max_error, errors.max().item())
        self.max_logit = max(self.max_logit, reference.abs().max().item())

    @property
    def perplexity(self) -> float:
        """Perplexity of the tokens that followed: e to their mean surprise."""
        return math.exp(self.surprise / self.num_predictions)


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of tokens, and where they come from."""

    name: str
    windows: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all windows together."""
        return sum(len(window) for window in self.windows)


def main() -> None:
    """Measure every precision on one text, and publish the figures."""
    options = _options()
    model = resolve_model(options.model, home_folder(os.environ), print)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = read_text(options.text, tokenizer, options.tokens, options.window)
    print(f"{text.name}: {text.num_tokens} tokens in windows of {options.window}, digest {_digest(text)}", flush=True)
    executors = {name: _load(model, precision, options.window) for name, precision in PRECISIONS.items()}
    rows = [*_compare_with_transformers(executors[FP32], model, text)]
    rows += [*_compare_with_fp32(executors, text), *_compare_outputs(executors, _prompts(tokenizer), tokenizer)]
    publish(rows, _headline(rows, text), options.json)


def read_text(file: Path | None, tokenizer: Any, num_tokens: int, window: int) -> Text:
    """Whole windows from the start of the text.

    Raises:
        SystemExit: it is too short.
    """
    name = file.name if file else f"pydoc_data.topics of CPython {platform.python_version()}"
    content = file.read_text() if file else "\n\n".join(topics[key] for key in sorted(topics))
    token_ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if len(token_ids) < num_tokens:
        raise SystemExit(f"{name} has {len(token_ids)} tokens, and --tokens asks for {num_tokens}")
    starts = range(0, num_tokens - window + 1, window)
    return Text(name, [token_ids[start : start + window] for start in starts])


def _compare_with_transformers(executor: CpuExecutor, model: Path, text: Text) -> Iterator[Row]:
    """The first window: fp32 sums in another order."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    comparison, window = Comparison(), text.windows[0]
    with torch.inference_mode():
        comparison.add(_logits(executor, window), stock(torch.tensor([window])).logits[0], window)
    case = f"transformers fp32, {len(window)} tokens"
    share = comparison.max_error / comparison.max_logit
    yield _row(FP32, case, "largest logit error", comparison.max_error, "")
    yield _row(FP32, case, "of the largest logit", share, "", at_most(1e-4))
    yield _row(FP32, case, "same top token", comparison.num_same_top / comparison.num_rows * 100, "%")


def _compare_with_fp32(executors: dict[str, CpuExecutor], text: Text) -> Iterator[Row]:
    comparisons = {name: Comparison() for name in executors}
    for index, window in enumerate(text.windows):
        reference = _logits(executors[FP32], window)
        for name, comparison in comparisons.items():
            comparison.add(reference if name == FP32 else _logits(executors[name], window), reference, window)
        print(f"window {index + 1} of {len(text.windows)}", flush=True)
    case = f"{text.name}, {text.num_tokens} tokens"
    for name, found in comparisons.items():
        yield _row(name, case, "perplexity", found.perplexity, "")
        if name != FP32:
            change = (found.perplexity / comparisons[FP32].perplexity - 1) * 100
            yield _row(name, case, "perplexity above fp32", change, "%", TARGETS.get(name))
            yield _row(name, case, "KL divergence from fp32", found.divergence / found.num_rows, "nats")
            yield _row(name, case, "mean logit error", found.error_sum / found.num_rows, "")
            yield _row(name, case, "largest logit error", found.max_error, "")
            yield _row(name, case, "same top token", found.num_same_top / found.num_rows * 100, "%")


def _compare_outputs(executors: dict[str, CpuExecutor], prompts: list[list[int]], tokenizer: Any) -> Iterator[Row]:
    outputs = {name: _greedy(executor, prompts, tokenizer.eos_token_id) for name, executor in executors.items()}
    lengths = [len(output) for output in outputs[FP32]]
    case = f"{len(prompts)} prompts, up to {max(lengths)} greedy tokens"
    for name in executors:
        if name != FP32:
            same = [common_prefix(*pair) for pair in zip(outputs[name], outputs[FP32], strict=True)]
            yield median_row("pdserve", name, case, "as with fp32 before the first difference", "tokens", same)
            whole = sum(count == length for count, length in zip(same, lengths, strict=True))
            yield _row(name, case, "whole output as with fp32", whole, f"of {len(prompts)}")


def _load(model: Path, precision: dict[str, Any], window: int) -> CpuExecutor:
    executor = CpuExecutor.load(model, block_size=BLOCK_SIZE, max_model_len=window, **precision)
    executor.allocate_kv_cache(len(PROMPTS) * _num_blocks(executor))
    return executor


def _logits(executor: CpuExecutor, token_ids: list[int]) -> Tensor:
    return executor.logits_of_all_tokens([SequenceSlice(token_ids, 0, _table(executor, 0), samples=True)])


def _table(executor: CpuExecutor, index: int) -> list[int]:
    num_blocks = _num_blocks(executor)
    return list(range(index * num_blocks, (index + 1) * num_blocks))


def _num_blocks(executor: CpuExecutor) -> int:
    """The number of KV blocks that a sequence of the greatest length takes."""
    return -(-executor.max_model_len // BLOCK_SIZE)


def _prompts(tokenizer: Any) -> list[list[int]]:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _greedy(executor: CpuExecutor, prompts: list[list[int]], eos_token_id: int) -> list[list[int]]:
    """All prompts in one batch; each output ends with its first end-of-sequence token."""
    batch = [SequenceSlice(prompt, 0, _table(executor, index), samples=True) for index, prompt in enumerate(prompts)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(OUTPUT_TOKENS):
        chosen = executor.run(batch).argmax(1).tolist()
        for output, token_id in zip(outputs, chosen, strict=True):
            output.append(token_id)
        batch = [
            SequenceSlice([token_id], piece.start + len(piece.token_ids), piece.block_table, samples=True)
            for piece, token_id in zip(batch, chosen, strict=True)
        ]
    return [_until(output, eos_token_id) for output in outputs]


def _until(output: list[int], last: int) -> list[int]:
    return output[: output.index(last) + 1] if last in output else output


def common_prefix(one: list[int], other: list[int]) -> int:
    """Number of equal tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _row(precision: str, case: str, metric: str, value: float, unit: str, target: Any = None) -> Row:
    return Row("pdserve", precision, case, metric, value, unit, (value,), target)


def _headline(rows: list[Row], text: Text) -> str:
    changes = {row.precision: row.value for row in rows if row.metric == "perplexity above fp32"}
    listed = ", ".join(f"{name} {change:+.2f} %" for name, change in changes.items())
    return f"perplexity against fp32 over {text.num_tokens} tokens of {text.name}: {listed}"


def _digest(text: Text) -> str:
    return hashlib.blake2b(repr(text.windows).encode(), digest_size=8).hexdigest()


def _options() -> argparse.Namespace:
    options = parser("accuracy", __doc__ or "")
    options.add_argument("--model", default="demo", help="what MODEL may name; it must suit the CPU executor")
    options.add_argument("--text", type=Path, metavar="FILE", help="default: CPython's language reference")
    options.add_argument("--tokens", type=int, default=20 * WINDOW_TOKENS, help="of the text; whole windows are used")
    options.add_argument("--window", type=int, default=WINDOW_TOKENS, help="tokens that are computed together")
    parsed = options.parse_args()
    if not MIN_WINDOW_TOKENS <= parsed.window <= parsed.tokens:
        options.error(f"--window must be at least {MIN_WINDOW_TOKENS} and at most --tokens, {parsed.tokens}")
    return parsed


if __name__ == "__main__":
    main()
