"""The guess at workers' prefix caches."""

from __future__ import annotations

import pytest

from pdserve.gateway.routing.router import PrefixMemory, prefix_hashes
from pdserve.registration import WorkerRef

A = WorkerRef("a", "1")


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (17, 4)])
def test_full_spans_are_hashed_but_one_token_is_always_left_to_compute(num_tokens: int, num_hashes: int) -> None:
    assert len(prefix_hashes(list(range(num_tokens)), 4, "")) == num_hashes


def test_a_hash_stands_for_everything_before_it_and_for_the_tenant() -> None:
    one, other = prefix_hashes([1] * 9, 4, ""), prefix_hashes([2, *[1] * 8], 4, "")
    assert set(one).isdisjoint(other)
    assert one[0] != one[1]
    assert set(one).isdisjoint(prefix_hashes([1] * 9, 4, "tenant"))
    assert prefix_hashes([*[1] * 8, 5, 6], 4, "") == one


def test_only_leading_spans_that_were_sent_there_are_hits() -> None:
    memory = PrefixMemory()
    memory.note_sent(A, [1, 2, 3], num_spans=100)
    assert memory.num_hit_spans(A, [1, 2, 9, 3]) == 2
    assert memory.num_hit_spans(A, [9, 1]) == 0
    assert memory.num_hit_spans(WorkerRef("a", "2"), [1, 2, 3]) == 0


def test_the_guess_is_bounded_like_the_workers_cache_and_keeps_what_was_used_last() -> None:
    memory = PrefixMemory()
    memory.note_sent(A, [1, 2], num_spans=3)
    memory.note_sent(A, [7], num_spans=3)
    memory.note_sent(A, [1, 2], num_spans=3)
    memory.note_sent(A, [8], num_spans=3)
    assert memory.num_hit_spans(A, [7]) == 0
    assert memory.num_hit_spans(A, [1, 2]) == 2


def test_credit_follows_what_the_worker_reports() -> None:
    memory = PrefixMemory()
    memory.note_sent(A, [1], num_spans=10)
    for _ in range(6):
        memory.note_reported(A, num_guessed_tokens=100, num_cached_tokens=0)
    assert memory.credit(A) < 0.05
    for _ in range(6):
        memory.note_reported(A, num_guessed_tokens=100, num_cached_tokens=100)
    assert memory.credit(A) > 0.95
    memory.note_reported(A, num_guessed_tokens=0, num_cached_tokens=0)
    assert memory.credit(A) > 0.95


def test_a_worker_that_is_gone_took_its_cache_along() -> None:
    memory = PrefixMemory()
    memory.note_sent(A, [1], num_spans=10)
    memory.forget(A)
    assert memory.num_hit_spans(A, [1]) == 0
