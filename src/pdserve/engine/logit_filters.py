"""What happens to logits before a token is drawn: penalties, bias, forbidden stops, and the cut of the tail.

Pure functions on a batch `[num_rows, vocab_size]`; a row's result depends on that row alone. Rows that ask for
nothing cost nothing.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from pdserve.engine.sequence import Sequence

_FIRST_CANDIDATES = 1024
"""Of the most likely tokens, looked at for top-p before the whole vocabulary is sorted: nearly always enough."""


def adjust(logits: Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> Tensor:
    """Penalties, then logit bias, then the mask of min_tokens. The argument is left as it is.

    Args:
        logits: fp32 `[num_rows, vocab_size]`.
        sequences: one per row.
        eos_token_ids: every id that ends a sequence by itself.
    """
    edits = _Edits(logits)
    for row, sequence in enumerate(sequences):
        params = sequence.sampling
        if params.repetition_penalty != 1.0:
            seen = {*sequence.prompt_token_ids, *sequence.output_token_ids}
            edits.scale(row, list(seen), params.repetition_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            counts = Counter(_original_output(sequence))
            amounts = [-params.presence_penalty - params.frequency_penalty * count for count in counts.values()]
            edits.add(row, list(counts), amounts)
        if params.logit_bias:
            edits.add(row, list(params.logit_bias), list(params.logit_bias.values()))
        if sequence.next_output_index < params.min_tokens:
            stops = stop_ids(sequence, eos_token_ids)
            edits.add(row, list(stops), [-math.inf] * len(stops))
    return edits.apply()


def stop_ids(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end this sequence."""
    params = sequence.sampling
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def _original_output(sequence: Sequence) -> list[int]:
    """All that the client has been sent: earlier attempts' tokens lie at the end of the dispatched prompt."""
    return sequence.prompt_token_ids[sequence.num_original_prompt_tokens :] + sequence.output_token_ids


class _Edits:
    """Collects sparse changes of all rows, so that each kind is one tensor operation."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._scaled: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._added: tuple[list[int], list[int], list[float]] = ([], [], [])

    def scale(self, row: int, token_ids: list[int], penalty: float) -> None:
        """Divide positive and multiply negative logits (CTRL, Keskar et al. 2019)."""
        self._collect(self._scaled, row, token_ids, [penalty] * len(token_ids))

    def add(self, row: int, token_ids: list[int], amounts: list[float]) -> None:
        self._collect(self._added, row, token_ids, amounts)

    def apply(self) -> Tensor:
        logits = self._logits
        if not (self._scaled[0] or self._added[0]):
            return logits
        logits = logits.clone()
        if self._scaled[0]:
            rows, token_ids, penalty = self._tensors(self._scaled)
            old = logits[rows, token_ids]
            logits[rows, token_ids] = torch.where(old > 0, old / penalty, old * penalty)
        if self._added[0]:
            rows, token_ids, amounts = self._tensors(self._added)
            logits.index_put_((rows, token_ids), amounts, accumulate=True)
        return logits

    def _collect(
        self, kind: tuple[list[int], list[int], list[float]], row: int, token_ids: list[int], values: list[float]
    ) -> None:
        # A tokenizer's end-of-sequence id may lie beyond the model's vocabulary: nothing to change there.
        pairs = [pair for pair in zip(token_ids, values, strict=True) if 0 <= pair[0] < self._logits.shape[1]]
        kind[0].extend([row] * len(pairs))
        kind[1].extend(token_id for token_id, _ in pairs)
        kind[2].extend(value for _, value in pairs)

    def _tensors(self, kind: tuple[list[int], list[int], list[float]]) -> tuple[Tensor, Tensor, Tensor]:
        device = self._logits.device
        values = torch.tensor(kind[2], dtype=self._logits.dtype, device=device)
        return torch.tensor(kind[0], device=device), torch.tensor(kind[1], device=device), values


def cut_tail(logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """Set to -inf what top-k, then top-p of the rest, then min-p exclude; equals at a border are all kept.

    Args:
        logits: fp32 `[num_rows, vocab_size]`, temperature applied.
        top_k: per row; 0 or less, or beyond the vocabulary: off.
        top_p: per row; 1: off.
        min_p: per row, relative to the most likely token; 0: off.
    """
    vocab_size = logits.shape[1]
    lowest = torch.full((logits.shape[0], 1), -math.inf, dtype=logits.dtype, device=logits.device)
    kept = [k if 0 < k < vocab_size else vocab_size for k in top_k]
    rows = [row for row, k in enumerate(kept) if k < vocab_size or top_p[row] < 1.0]
    if rows:
        lowest[rows] = _smallest_kept(logits[rows], [kept[row] for row in rows], [top_p[row] for row in rows])
    if any(ratio > 0.0 for ratio in min_p):
        ratios = torch.tensor(min_p, dtype=logits.dtype, device=logits.device)[:, None]
        lowest = torch.maximum(lowest, logits.amax(1, keepdim=True) + ratios.log())
    elif not rows:
        return logits
    return logits.masked_fill(logits < lowest, -math.inf)


def _smallest_kept(logits: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """The smallest logit `[num_rows, 1]` that top-k and top-p keep."""
    vocab_size = logits.shape[1]
    bounded = [k for k in top_k if k < vocab_size]
    num_candidates = min(vocab_size, max([_FIRST_CANDIDATES, *bounded]))
    smallest, is_enough = _smallest_among(logits, top_k, top_p, num_candidates)
    if not is_enough:
        smallest, _ = _smallest_among(logits, top_k, top_p, vocab_size)
    return smallest


def _smallest_among(logits: Tensor, top_k: list[int], top_p: list[float], num_candidates: int) -> tuple[Tensor, bool]:
    """As `_smallest_kept`, looking at the most likely candidates; and whether those were enough for every row."""
    best = logits.topk(num_candidates, dim=1).values
    k = torch.tensor(top_k, device=logits.device)[:, None]
    p = torch.tensor(top_p, dtype=torch.float64, device=logits.device)[:, None]
    kth = best.gather(1, k.clamp(max=num_candidates) - 1)
    kth = torch.where(k <= num_candidates, kth, -math.inf)
    mass = torch.where(logits >= kth, logits, -math.inf).logsumexp(1, keepdim=True)
    probabilities = torch.where(best >= kth, best - mass, -math.inf).exp().double()
    before = probabilities.cumsum(1) - probabilities
    # The most likely token is kept whatever rounding says, and top_p = 1 keeps all that top-k kept.
    is_kept = (best >= kth) & ((before < p) | (before == 0) | (p >= 1.0))
    smallest = torch.where(is_kept, best, math.inf).amin(1, keepdim=True)
    is_cut = is_kept[:, -1:] & (k > num_candidates) & (num_candidates < logits.shape[1])
    return torch.where(p >= 1.0, kth, smallest), not bool(is_cut.any())
