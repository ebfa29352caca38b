"""What a greedy continuation must be: the stock transformers model, token for token; only near ties are forgiven."""

from __future__ import annotations

import itertools

import torch

from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.messages import AttemptKey
from pdserve.sampling_params import SamplingParams

TIE_GAP = 1e-4
"""Logit distance below which float32 summed in another order may decide otherwise."""

_numbers = itertools.count()


def make_sequence(prompt: list[int], max_tokens: int = 8, **options) -> Sequence:
    """A greedy sequence that no end-of-sequence token cuts short, unless told otherwise."""
    sampling = {"seed": 0, "temperature": 0.0, "ignore_eos": True, **options.pop("sampling", {})}
    number = next(_numbers)
    return Sequence(
        key=AttemptKey(options.pop("request_id", f"r{number}"), options.pop("choice", 0), 0, f"nonce{number}"),
        prompt_token_ids=prompt,
        num_original_prompt_tokens=options.pop("num_original_prompt_tokens", len(prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        **options,
    )


def run_to_end(engine: Engine, max_steps: int = 2000) -> list:
    """Step until nothing is left; every step leaves the ledger in order."""
    outputs = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs.append(engine.step())
        engine.check_integrity()
    raise AssertionError(
        f"still at work after {max_steps} steps: {engine.scheduler.waiting} {engine.scheduler.running}"
    )


@torch.no_grad()
def assert_greedy(stock: torch.nn.Module, prompt: list[int], output: list[int]) -> int:
    """The output is what `generate` gives; from a near tie on it may differ. Returns 1 for a tie, else 0."""
    prompt_ids = torch.tensor([prompt])
    expected = stock.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=len(output),
        min_new_tokens=len(output),
        eos_token_id=None,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    for index, (got, wanted) in enumerate(zip(output, expected, strict=True)):
        if got != wanted:
            logits = stock(torch.tensor([prompt + output[:index]])).logits[0, -1]
            gap = float(logits[wanted] - logits[got])
            assert abs(gap) < TIE_GAP, f"token {index} is {got}, expected {wanted} (gap {gap:.2e}): {output} {expected}"
            return 1
    return 0
