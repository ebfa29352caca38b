"""Log-probabilities of tokens: the model's own, before penalties and temperature, with the best alternatives.

For tokens that were sampled, and for those of prompts that are scored: each row of a prompt's logits says how likely
the prompt's next token is.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.sequence import Sequence
from pdserve.messages import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""
_ROWS_AT_ONCE = 64
"""Rows of a prompt's logits that are normalised together: bounds the copies of them."""

Scores = list[tuple[Sequence, list[TokenLogprobs]]]


def logprobs_of(logits: Tensor, token_ids: Tensor, counts: Rows[int]) -> list[TokenLogprobs]:
    """What is told of one token a row.

    Args:
        logits: fp32 `[num_rows, vocab_size]`, left as they are.
        token_ids: int64 `[num_rows]`.
        counts: best alternatives of each row.
    """
    table = logits.log_softmax(1)
    chosen = table.gather(1, token_ids[:, None])
    ranks: list[int] = (table >= chosen).sum(1).tolist()
    table, chosen = table.clamp(min=MIN_LOGPROB), chosen.clamp(min=MIN_LOGPROB)
    best = table.topk(min(max(counts), table.shape[1]), dim=1)
    result = []
    rows = zip(chosen[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), counts, strict=True)
    for logprob, rank, ids, values, count in rows:
        # Equals by id, so that the order does not hang on how the device sorts.
        top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count]
        result.append(
            TokenLogprobs(
                logprob=logprob,
                top_token_ids=[token_id for token_id, _ in top],
                top_logprobs=[value for _, value in top],
                rank=rank,
            )
        )
    return result


def score_prompts(logits: Tensor, batch: list[SequenceSlice]) -> tuple[Tensor, Scores]:
    """Take the rows of scored prompts out of a step's logits.

    Args:
        logits: fp32 `[sum of the slices' num_logits, vocab_size]`.
        batch: slices whose tags are their sequences.

    Returns:
        The rows that sample, and the log-probabilities of each scored sequence's next prompt tokens.
    """
    sampling: list[int] = []
    scores: Scores = []
    end = 0
    for piece in batch:
        start, end = end, end + piece.num_logits
        if piece.samples:
            sampling.append(end - 1)
        if piece.num_scored:
            num_rows = piece.num_logits - int(piece.samples)
            scores.append((piece.tag, _score(piece.tag, logits[start : start + num_rows])))
    return logits[sampling], scores


def _score(sequence: Sequence, logits: Tensor) -> list[TokenLogprobs]:
    """Log-probabilities of the sequence's prompt tokens from `num_scored_tokens` on, one for each row."""
    count, first = sequence.sampling.prompt_logprobs, sequence.num_scored_tokens
    assert count is not None, sequence.key
    result: list[TokenLogprobs] = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        targets = sequence.prompt_token_ids[first + start : first + start + len(rows)]
        result += logprobs_of(rows, torch.tensor(targets, device=logits.device), [count] * len(rows))
    return result
