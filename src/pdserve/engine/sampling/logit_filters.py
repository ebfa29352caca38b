"""What a request changes in its logits before a token is drawn: penalties, bias, stops held back.

Pure functions on a batch `[num_rows, vocab_size]`; a row's result depends on that row alone. Rows that ask for
nothing cost nothing.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from pdserve.engine.sequence import Sequence


def adjust(logits: Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> Tensor:
    """Penalties, then logit bias, then masks: min_tokens, bad words, allowed ids. The argument is left as it is.

    Where masks leave none of the allowed ids, these ids alone count.

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
        masked = frozenset[int]()
        if sequence.next_output_index < params.min_tokens:
            masked |= stop_ids(sequence, eos_token_ids)
        if params.bad_words:
            masked |= _ends_of_bad_words(sequence)
        if params.allowed_token_ids:
            edits.keep(row, [i for i in params.allowed_token_ids if i not in masked] or list(params.allowed_token_ids))
        elif masked:
            edits.add(row, list(masked), [-math.inf] * len(masked))
    return edits.apply()


def stop_ids(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end this sequence."""
    params = sequence.sampling
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def _original_output(sequence: Sequence) -> list[int]:
    """All that the client has been sent: earlier attempts' tokens lie at the end of the dispatched prompt."""
    return sequence.prompt_token_ids[sequence.num_original_prompt_tokens :] + sequence.output_token_ids


def _ends_of_bad_words(sequence: Sequence) -> set[int]:
    """Last tokens of the bad words whose other tokens end the output."""
    words = sequence.sampling.bad_words
    num_looked_at = min(sequence.next_output_index, max(map(len, words)) - 1)
    newest = tuple(sequence.tokens(sequence.num_tokens - num_looked_at, sequence.num_tokens))
    return {word[-1] for word in words if newest[len(newest) - len(word) + 1 :] == word[:-1]}


class _Edits:
    """Collects sparse changes of all rows, so that each kind is one tensor operation."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._scaled: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._added: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._kept: dict[int, list[int]] = {}

    def scale(self, row: int, token_ids: list[int], penalty: float) -> None:
        """Divide positive and multiply negative logits (CTRL, Keskar et al. 2019)."""
        self._collect(self._scaled, row, token_ids, [penalty] * len(token_ids))

    def add(self, row: int, token_ids: list[int], amounts: list[float]) -> None:
        self._collect(self._added, row, token_ids, amounts)

    def keep(self, row: int, token_ids: list[int]) -> None:
        """Mask all other tokens."""
        self._kept[row] = token_ids

    def apply(self) -> Tensor:
        logits = self._logits
        if not (self._scaled[0] or self._added[0] or self._kept):
            return logits
        logits = logits.clone()
        if self._scaled[0]:
            rows, token_ids, penalty = self._tensors(self._scaled)
            old = logits[rows, token_ids]
            logits[rows, token_ids] = torch.where(old > 0, old / penalty, old * penalty)
        if self._added[0]:
            rows, token_ids, amounts = self._tensors(self._added)
            logits.index_put_((rows, token_ids), amounts, accumulate=True)
        for row, kept in self._kept.items():
            chosen = torch.tensor(kept, device=logits.device)
            values = logits[row, chosen]
            logits[row] = -math.inf
            logits[row, chosen] = values
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
