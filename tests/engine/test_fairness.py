"""The scheduler's pure decisions."""

from __future__ import annotations

from engine_oracle import make_sequence
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.fairness import choose_victim, prefill_order, protection_order, share_budget


@given(st.lists(st.integers(1, 30_000), max_size=12), st.integers(0, 2048))
def test_a_shared_budget_is_given_away_and_never_exceeded(wanted, budget):
    grants = share_budget(wanted, budget)
    assert sum(grants) == min(budget, sum(wanted))
    assert all(0 <= grant <= tokens for grant, tokens in zip(grants, wanted, strict=True))


def test_a_long_prompt_leaves_half_to_the_short_ones_behind_it():
    assert share_budget([20_000, 30, 100], 512) == [382, 30, 100]
    assert share_budget([20_000, 200, 200, 200], 512) == [256, 200, 56, 0]
    assert share_budget([20_000], 512) == [512]


def test_a_second_long_prompt_waits_while_short_ones_are_served_and_the_first_always_advances():
    assert share_budget([5000, 5000, 100], 512) == [412, 0, 100]
    assert share_budget([5000, *[10] * 100], 512)[0] == 256


def test_order_is_priority_then_preempted_then_arrival_and_aged_ones_before_all():
    old_low = make_sequence([1], priority=9, arrival_s=0.0)
    first, second = make_sequence([1], arrival_s=91.0), make_sequence([1], arrival_s=92.0)
    preempted = make_sequence([1], arrival_s=93.0)
    preempted.num_preemptions = 1
    urgent = make_sequence([1], priority=-1, arrival_s=99.0)
    order = prefill_order([second, first, old_low, urgent, preempted], 100.0, 50.0)
    assert order == [old_low, urgent, preempted, first, second]


def test_the_oldest_is_protected_then_priority_then_early_admission():
    oldest = make_sequence([1], priority=5, arrival_s=0.0)
    a, b, low = (make_sequence([1], priority=p, arrival_s=t) for p, t in ((0, 3.0), (0, 2.0), (1, 1.0)))
    assert protection_order([a, low, b, oldest]) == [oldest, a, b, low]
    assert protection_order([]) == []


def test_victims_yield_something_and_are_not_taken_twice_in_a_row():
    first, second, third = (make_sequence([1]) for _ in range(3))
    yields = {id(first): 1, id(second): 4, id(third): 0}

    def num_yielded(sequence):
        return yields[id(sequence)]

    order = [first, second, third]
    assert choose_victim(order, None, num_yielded, may_repeat=False) is second
    assert choose_victim(order, second, num_yielded, may_repeat=False) is first
    assert choose_victim([second, third], second, num_yielded, may_repeat=False) is None
    assert choose_victim([second, third], second, num_yielded, may_repeat=True) is second
    assert choose_victim([third], None, num_yielded, may_repeat=True) is None
