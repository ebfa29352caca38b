from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pdserve.verify.compare import Comparison, Tally, Verdict, compare, first_difference


@dataclass(frozen=True)
class Counting:
    """A reference that counts on from the prompt's last token; it is undecided only before multiples of 10."""

    token_ids: tuple[int, ...]

    def gap(self, index: int, token_id: int) -> float:
        is_undecided = self.token_ids[index] % 10 == 0 and token_id == self.token_ids[index] + 1
        return 1e-6 if is_undecided else 3.0


def generate(prompt: Sequence[int], max_tokens: int) -> Counting:
    start = prompt[-1] + 1
    end = next((t for t in range(start, start + max_tokens) if t % 100 == 0), start + max_tokens - 1)
    return Counting(tuple(range(start, end + 1)))


def test_equal_tokens_are_equal() -> None:
    assert compare([1], [2, 3, 4], 3, generate) == Comparison(Verdict.EQUAL, 3)


def test_a_clear_difference_is_a_mismatch_that_says_where() -> None:
    found = compare([1], [2, 3, 7], 3, generate)
    assert found.verdict is Verdict.MISMATCH
    assert found.num_tokens == 2
    assert "token 2 is 7, the reference has 4 (gap 3)" in found.detail


def test_a_difference_between_undecided_tokens_is_a_tie_and_the_rest_is_still_compared() -> None:
    assert compare([8], [9, 11, 12, 13], 4, generate).verdict is Verdict.TIE
    assert compare([8], [9, 11, 12, 99], 4, generate).verdict is Verdict.MISMATCH


def test_a_tie_in_the_last_token_is_a_tie() -> None:
    assert compare([8], [9, 11], 2, generate).verdict is Verdict.TIE


@pytest.mark.parametrize("got", [[], [2], [2, 3], [2, 3, 4, 5]])
def test_a_lost_or_surplus_token_is_a_mismatch(got: list[int]) -> None:
    assert compare([1], got, 3, generate).verdict is Verdict.MISMATCH


def test_an_early_end_is_right_only_where_the_reference_ends_too() -> None:
    assert compare([97], [98, 99, 100], 8, generate).verdict is Verdict.EQUAL
    assert compare([97], [98, 99], 8, generate).verdict is Verdict.MISMATCH
    assert compare([97], [98, 99, 100, 101], 8, generate).verdict is Verdict.MISMATCH


def test_a_doubled_token_is_a_mismatch() -> None:
    assert compare([1], [2, 2, 3], 3, generate).verdict is Verdict.MISMATCH


def test_the_first_difference_of_a_prefix_is_its_length() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1], [1, 2]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], []) is None


def test_a_tally_is_right_only_without_mismatches_and_with_few_ties() -> None:
    tally = Tally()
    assert not tally.is_ok, "nothing compared proves nothing"
    for _ in range(99):
        tally.add(Comparison(Verdict.EQUAL, 5))
    tally.add(Comparison(Verdict.TIE, 5))
    assert tally.is_ok
    assert str(tally) == "verify: 100 prompts, 500 tokens, 0 mismatches, 1 ties"
    tally.add(Comparison(Verdict.TIE, 5))
    assert not tally.is_ok
    tally = Tally(num_prompts=10)
    tally.add(Comparison(Verdict.MISMATCH, 0))
    assert not tally.is_ok
