"""Whether an answer of the service equals the reference's, token for token. Pure.

A first difference is a *tie* only if the reference itself is undecided there: its own logits of the two
tokens lie within `MAX_TIE_GAP`. After a tie the comparison goes on from the service's choice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_TIE_GAP = 1e-4
"""Logits; rounding of fp32 in another order of summation moves them by about 1e-6."""
MAX_TIE_RATIO = 0.01
"""Ties per prompt at most: more of them are no accident."""


class Verdict(enum.Enum):
    """The outcome for one prompt."""

    EQUAL = "equal"
    TIE = "tie"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found, and where."""

    verdict: Verdict
    num_tokens: int
    """Number of tokens that were compared."""
    detail: str = ""


class Answer(Protocol):
    """A reference's answer; see `reference.ReferenceAnswer`."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the reference generates."""

    def gap(self, index: int, token_id: int) -> float:
        """How much it prefers its own token to another there."""


Generate = Callable[[Sequence[int], int], Answer]
"""(prompt, max_tokens) -> the reference's answer."""


def compare(prompt: Sequence[int], got: Sequence[int], max_tokens: int, generate: Generate) -> Comparison:
    """Compare the service's greedy tokens with the reference's.

    Args:
        prompt: token ids.
        got: what the service generated, end-of-sequence token included.
        max_tokens: what both were asked for.
        generate: the reference.
    """
    done = 0
    ties: list[str] = []
    while True:
        answer = generate([*prompt, *got[:done]], max_tokens - done)
        rest = got[done:]
        index = first_difference(rest, answer.token_ids)
        if index is None:
            return Comparison(Verdict.TIE if ties else Verdict.EQUAL, len(got), "; ".join(ties))
        if index >= len(rest) or index >= len(answer.token_ids):
            what = f"{len(got)} tokens, the reference has {done + len(answer.token_ids)}"
            return Comparison(Verdict.MISMATCH, done + index, what)
        gap = answer.gap(index, rest[index])
        where = f"token {done + index} is {rest[index]}, the reference has {answer.token_ids[index]} (gap {gap:.2g})"
        if gap >= MAX_TIE_GAP:
            return Comparison(Verdict.MISMATCH, done + index, where)
        ties.append(where)
        done += index + 1
        if done == len(got):
            return Comparison(Verdict.TIE, len(got), "; ".join(ties))


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first difference; the shorter length when one is a prefix of the other; None when equal."""
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine != theirs:
            return index
    return None if len(got) == len(expected) else min(len(got), len(expected))


@dataclass(slots=True)
class Tally:
    """Sums over all comparisons of a verification."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0
    num_ties: int = 0

    def add(self, comparison: Comparison) -> None:
        """Count the comparison of one prompt."""
        self.num_prompts += 1
        self.num_tokens += comparison.num_tokens
        self.num_mismatches += comparison.verdict is Verdict.MISMATCH
        self.num_ties += comparison.verdict is Verdict.TIE

    @property
    def is_ok(self) -> bool:
        """No mismatch, at least one prompt, and no more ties than accidents explain."""
        has_few_ties = self.num_ties <= MAX_TIE_RATIO * self.num_prompts
        return self.num_prompts > 0 and self.num_mismatches == 0 and has_few_ties

    def __str__(self) -> str:
        return (
            f"verify: {self.num_prompts} prompts, {self.num_tokens} tokens, "
            f"{self.num_mismatches} mismatches, {self.num_ties} ties"
        )
