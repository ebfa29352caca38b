"""Log-probabilities of tokens: the model's own, before penalties and temperature, with the best alternatives.

For tokens that were sampled, and for those of prompts that are scored. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.messages import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


def logprobs_of(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
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
