"""The quality benchmark: its sums against plain arithmetic, and a run on a tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.accuracy import Comparison, common_prefix

from pdserve.kernels.cpu import ops as cpu_ops


def test_logits_compared_with_themselves_differ_in_nothing():
    logits, token_ids, found = torch.randn(300, 40), torch.arange(300).remainder(40).tolist(), Comparison()
    found.add(logits, logits, token_ids)
    assert (found.num_rows, found.num_predictions, found.num_same_top) == (300, 299, 300)
    assert found.max_error == found.error_sum == 0
    assert found.divergence == pytest.approx(0, abs=1e-4)


def test_sums_over_windows_are_those_of_plain_arithmetic():
    found, surprises, divergences = Comparison(), [], []
    for seed, count in ((0, 150), (1, 7)):
        torch.manual_seed(seed)
        logits, reference = torch.randn(2, count, 20, dtype=torch.float64)
        token_ids = torch.randint(20, (count,)).tolist()
        found.add(logits, reference, token_ids)
        chances, expected = logits.softmax(1), reference.softmax(1)
        surprises += [-math.log(chances[i, token_ids[i + 1]]) for i in range(count - 1)]
        divergences.append((expected * (expected / chances).log()).sum().item())
    assert found.perplexity == pytest.approx(math.exp(sum(surprises) / len(surprises)))
    assert found.divergence == pytest.approx(sum(divergences))


@pytest.mark.parametrize(("one", "other", "count"), [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1], [2], 0)])
def test_outputs_agree_until_they_first_differ_or_one_ends(one, other, count):
    assert common_prefix(one, other) == common_prefix(other, one) == count


@pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))
def test_every_precision_is_compared_with_fp32_and_fp32_with_transformers(tmp_path, tiny_model_dir):
    command = [sys.executable, "-m", "benchmarks.accuracy", "--model", str(tiny_model_dir)]
    command += ["--tokens", "1100", "--window", "512", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, headline = json.loads((tmp_path / "figures.json").read_text())["rows"], done.stdout.splitlines()[-1]
    perplexities = {row["precision"]: row["value"] for row in rows if row["metric"] == "perplexity"}
    assert list(perplexities) == ["fp32", "fp32, KV bf16", "bf16, KV bf16", "int8, KV bf16"]
    errors = {row["precision"]: row["value"] for row in rows if row["metric"] == "mean logit error"}
    assert 0 < errors["fp32, KV bf16"] < errors["bf16, KV bf16"] < errors["int8, KV bf16"]
    assert "over 1024 tokens of pydoc_data.topics" in headline
    assert "of 3 targets met" in headline  # a random model's few tokens say nothing about the demo model's 0.1 %
    for precision, perplexity in perplexities.items():
        assert perplexity == pytest.approx(perplexities["fp32"], rel=0.01), precision
