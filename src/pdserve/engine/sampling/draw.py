"""Draws one token of each row: top-k, top-p and min-p, then the inverse of the cumulative distribution.

A row's result depends on its logits, its own parameters and its uniform number alone. Tokens are summed in the
order of their ids. Rows without a filter are summed in pieces, of which only the one that is hit is looked into.
Rows with a filter look at their most likely tokens alone, at more of them only when those do not suffice.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = (256, 4096)
"""Most likely tokens that filtered rows look at, before the whole vocabulary is sorted."""

_PIECE = 256
_TINIEST_TEMPERATURE = 1e-30
"""Its inverse is still a float32; 0 would mean greedy."""


def draw(logits: Tensor, numbers: Tensor, *, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """One token of each row.

    Args:
        logits: fp32 `[num_rows, vocab_size]`, temperature applied, at most 0 and 0 for the most likely token of
            each row; may be overwritten.
        numbers: float64 `[num_rows]` in [0, 1).
        top_k: per row; 0 or less, or at least the vocabulary: off.
        top_p: per row, of what top-k keeps; 1: off.
        min_p: per row, relative to the most likely token; 0: off.

    Returns:
        int64 `[num_rows]`. Tokens as likely as the last one kept are kept too.
    """
    num_rows, vocab_size = logits.shape
    kept = [k if 0 < k < vocab_size else vocab_size for k in top_k]
    is_filtered = [kept[row] < vocab_size or top_p[row] < 1.0 or min_p[row] > 0.0 for row in range(num_rows)]
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    left = [row for row in range(num_rows) if is_filtered[row]]
    for num_candidates in (*CANDIDATES, vocab_size):
        if not left:
            break
        drawn, is_enough = _draw_filtered(
            _pick_rows(logits, left),
            numbers[left],
            torch.tensor([kept[row] for row in left], device=logits.device)[:, None],
            torch.tensor([top_p[row] for row in left], dtype=torch.float64, device=logits.device)[:, None],
            torch.tensor([min_p[row] for row in left], dtype=logits.dtype, device=logits.device)[:, None],
            min(num_candidates, vocab_size),
        )
        tokens[left] = drawn
        left = [row for row, enough in zip(left, is_enough.tolist(), strict=True) if not enough]
    plain = [row for row in range(num_rows) if not is_filtered[row]]
    if plain:
        tokens[plain] = _draw_plain(_pick_rows(logits, plain), numbers[plain])
    return tokens


def draw_on_gpu(
    logits: Tensor, temperatures: Tensor, numbers: Tensor, *, top_k: list[int], top_p: list[float], min_p: list[float]
) -> Tensor:
    """The same by one Triton kernel, without a sort and without waiting for the device.

    Args:
        logits: fp32 `[num_rows, vocab_size]`, as the model made them.
        temperatures: fp32 `[num_rows]`, above 0; the rest as for `draw`.
    """
    from pdserve.kernels.sample_top_k_top_p import sample_top_k_top_p  # noqa: PLC0415 — brings Triton

    return sample_top_k_top_p(*kernel_arguments(logits, temperatures, numbers, top_k=top_k, top_p=top_p, min_p=min_p))


def kernel_arguments(
    logits: Tensor, temperatures: Tensor, numbers: Tensor, *, top_k: list[int], top_p: list[float], min_p: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `sample_top_k_top_p` takes, in its types."""
    device, vocab_size = logits.device, logits.shape[1]
    return (
        logits,
        temperatures.clamp(min=_TINIEST_TEMPERATURE),
        torch.tensor([min(k, vocab_size) for k in top_k], dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        numbers,
    )


def _pick_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _draw_plain(logits: Tensor, numbers: Tensor) -> Tensor:
    """int64 `[num_rows]` from the whole distribution."""
    num_rows, vocab_size = logits.shape
    piece = next((size for size in (_PIECE, _PIECE // 2, _PIECE // 4) if vocab_size % size == 0), _PIECE)
    weights = logits.exp_()  # in place: on a CPU a fresh batch of logits costs more than its arithmetic
    if vocab_size % piece:
        weights = F.pad(weights, (0, -vocab_size % piece))
    weights = weights.view(num_rows, -1, piece)
    ends = weights.sum(2).double().cumsum(1)
    hit, rest = _invert(ends, numbers * ends[:, -1])
    inside = weights[torch.arange(num_rows, device=logits.device), hit].double().cumsum(1)
    place, _ = _invert(inside, rest)
    return (hit * piece + place).clamp(max=vocab_size - 1)


def _invert(cumulative: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Where each target falls in its row of sums, int64 `[num_rows]`, and what is left of it there."""
    # A target below the total falls on something of positive probability; rounding must not make it equal.
    total = cumulative[:, -1]
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    place = torch.searchsorted(cumulative, targets, right=True).clamp(max=cumulative.shape[1] - 1)
    before = torch.where(place > 0, cumulative.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place[:, 0], (targets - before)[:, 0]


def _draw_filtered(
    logits: Tensor, numbers: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Tokens `[num_rows]`, and whether nothing that is kept lies beyond the candidates (else draw again)."""
    values, token_ids = logits.topk(num_candidates, dim=1)
    last = values[:, -1:]
    kth = values.gather(1, top_k.clamp(max=num_candidates) - 1)
    kth = torch.where(top_k < logits.shape[1], kth, -math.inf)
    smallest = _smallest_kept(logits, values, kth, top_p, min_p)
    # Top-p counts in the mass of all that top-k keeps, so that must lie within the candidates too.
    must_be_seen = torch.where((top_p < 1.0) & (top_k < logits.shape[1]), torch.minimum(smallest, kth), smallest)
    is_enough = (last < must_be_seen)[:, 0] | (num_candidates == logits.shape[1])
    token_ids, order = token_ids.sort(1)
    kept = values.masked_fill(values < smallest, -math.inf).gather(1, order)
    cumulative = kept.softmax(1).double().cumsum(1)
    place, _ = _invert(cumulative, numbers * cumulative[:, -1])
    return token_ids.gather(1, place[:, None])[:, 0], is_enough


def _smallest_kept(logits: Tensor, values: Tensor, kth: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit `[num_rows, 1]` that all filters keep.

    `values` are the largest logits in descending order; `kth` the smallest that top-k keeps, -inf without top-k.
    """
    smallest = kth
    if bool((top_p < 1.0).any()):
        mass = torch.where(values >= kth, values, -math.inf).logsumexp(1, keepdim=True)
        mass = torch.where(kth > -math.inf, mass, logits.logsumexp(1, keepdim=True))
        probabilities = torch.where(values >= kth, values - mass, -math.inf).exp().double()
        before = probabilities.cumsum(1) - probabilities
        # The most likely token is kept whatever rounding says.
        is_kept = (values >= kth) & ((before < top_p) | (before == 0))
        nucleus = torch.where(is_kept, values, math.inf).amin(1, keepdim=True)
        smallest = torch.where(top_p < 1.0, nucleus, kth)
    return torch.maximum(smallest, values[:, :1] + min_p.log())
