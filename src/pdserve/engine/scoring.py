"""Scores prompts: takes the rows of their tokens out of a step's logits, and makes log-probabilities of them.

Each row of a prompt's logits says how likely the prompt's next token is. A prompt whose log-probabilities are wanted is
computed even where the prefix cache has it, in chunks that bound the logits. Never sees an executor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.sampling.logprobs import logprobs_of
from pdserve.engine.sequence import Sequence
from pdserve.messages import TokenLogprobs

_ROWS_AT_ONCE = 64
"""Rows of a prompt's logits that are normalised together: bounds the copies of them."""

Scores = list[tuple[Sequence, list[TokenLogprobs]]]


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
