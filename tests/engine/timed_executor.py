"""A fake executor whose steps take as long as a cost model says, on a virtual clock: hours pass in seconds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.engine.executors.fake import FakeExecutor, FakeOptions
from pdserve.engine.scheduling.step_time import num_pairs

VOCAB, EOS, BLOCK_SIZE = 997, frozenset({1}), 16


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Cost:
    """Seconds. The defaults are a 135M model on two laptop cores."""

    step_s: float = 0.03
    sequence_s: float = 0.0045
    context_s: float = 3e-6
    token_s: float = 0.0022
    pair_s: float = 1.0e-6

    def seconds(self, batch) -> float:
        total_s = self.step_s
        for piece in batch:
            num_tokens = len(piece.token_ids)
            if num_tokens == 1:
                total_s += self.sequence_s + self.context_s * piece.start
            else:
                total_s += self.token_s * num_tokens + self.pair_s * num_pairs(piece.start, num_tokens)
        return total_s


class TimedExecutor(FakeExecutor):
    """Tokens do not matter here: they are all the same."""

    def __init__(self, clock: Clock, cost: Cost, *, noise=lambda: 1.0) -> None:
        super().__init__(
            FakeOptions(), vocab_size=VOCAB, eos_token_ids=EOS, block_size=BLOCK_SIZE, max_model_len=32_768
        )
        self._clock, self._cost, self._noise = clock, cost, noise

    def run(self, batch):
        self._clock.now_s += self._cost.seconds(batch) * self._noise()
        logits = torch.zeros(sum(piece.samples for piece in batch), VOCAB)
        logits[:, 7] = 1.0
        return logits
