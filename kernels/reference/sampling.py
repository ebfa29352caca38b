"""Eager torch twin of the sampling kernel: every row sorted in float64, one after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sample_top_k_top_p(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """One token of each row, as `pdserve.kernels.sample_top_k_top_p` says."""
    tokens = []
    for row, temperature in enumerate(temperatures.tolist()):
        if temperature == 0:
            tokens.append(int(logits[row].argmax()))
            continue
        cumulative = kept_distribution(
            logits[row].double() / temperature, int(top_k[row]), float(top_p[row]), float(min_p[row])
        ).cumsum(0)
        target = numbers[row] * cumulative[-1]
        last = int(cumulative.argmax())  # the first place that reaches the total
        tokens.append(min(int(torch.searchsorted(cumulative, target, right=True)), last))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def kept_distribution(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities `[vocab_size]` of one row after all filters.

    Args:
        scaled: float64 `[vocab_size]`, divided by the temperature.
        top_k: 0 or less, or at least the vocabulary: off.
        top_p: of what top-k keeps; 1: off.
        min_p: relative to the most likely token; 0: off.
    """
    smallest = -math.inf
    if 0 < top_k < len(scaled):
        smallest = float(scaled.topk(top_k).values[-1])
    probabilities = scaled.masked_fill(scaled < smallest, -math.inf).softmax(0)
    if top_p < 1:
        order = scaled.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        is_kept = before < top_p
        is_kept[0] = True
        smallest = max(smallest, float(scaled[order][is_kept][-1]))
    if min_p > 0:
        smallest = max(smallest, float(scaled.max()) + math.log(min_p))
    return probabilities.masked_fill(scaled < smallest, 0.0)
