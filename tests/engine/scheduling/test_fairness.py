"""The scheduler's pure decisions."""

from __future__ import annotations

from engine_oracle import make_sequence

from pdserve.engine.scheduling.fairness import choose_victim, guaranteed_prompt, prefill_order, protection_order


def test_seniority_is_priority_then_preempted_then_arrival_and_the_oldest_aged_one_before_all():
    old_low, older_low = make_sequence([1], priority=9, arrival_s=1.0), make_sequence([1], priority=10, arrival_s=0.0)
    first, second = make_sequence([1], arrival_s=91.0), make_sequence([1], arrival_s=92.0)
    preempted = make_sequence([1], arrival_s=93.0)
    preempted.num_preemptions = 1
    urgent = make_sequence([1], priority=-1, arrival_s=99.0)
    left = [second, first, old_low, urgent, older_low, preempted]
    order = []
    while left:
        order.append(guaranteed_prompt(left, 100.0, 50.0))
        left.remove(order[-1])
    assert order == [older_low, old_low, urgent, preempted, first, second]


def test_order_is_priority_then_preempted_then_least_remaining_time_then_arrival():
    long, short = make_sequence([1] * 90, arrival_s=1.0), make_sequence([1] * 5, arrival_s=4.0)
    late_short = make_sequence([1] * 5, arrival_s=5.0)
    preempted = make_sequence([1] * 50, arrival_s=6.0)
    preempted.num_preemptions = 1
    urgent = make_sequence([1] * 70, priority=-1, arrival_s=9.0)
    order = prefill_order([long, late_short, urgent, short, preempted], lambda sequence: sequence.num_tokens)
    assert order == [urgent, preempted, short, late_short, long]


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
