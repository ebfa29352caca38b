"""The queue's order, which never changes while entries wait."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.dispatch.dispatch_loop import QueueEntry, WaitingQueue


def push(
    queue: WaitingQueue, item: Any, num_tokens: int, queued_s: float, priority: int = 0, **changes: Any
) -> QueueEntry:
    entry = QueueEntry([item], num_tokens, queued_s, **changes)
    queue.push(entry, priority)
    return entry


def order(queue: WaitingQueue) -> list[Any]:
    return [entry.sequences[0] for entry in queue]


def test_first_come_first_served_within_a_priority() -> None:
    queue = WaitingQueue(ageing_s=10.0)
    for name in "abc":
        push(queue, name, 1, queued_s=1.0)
    assert order(queue) == ["a", "b", "c"]


def test_a_lower_priority_number_goes_first_until_the_other_has_aged() -> None:
    queue = WaitingQueue(ageing_s=10.0)
    push(queue, "patient", 1, queued_s=0.0, priority=1)
    push(queue, "urgent", 1, queued_s=9.0, priority=0)
    push(queue, "late", 1, queued_s=11.0, priority=0)
    assert order(queue) == ["urgent", "patient", "late"]


def test_re_dispatches_go_before_every_new_request() -> None:
    queue = WaitingQueue(ageing_s=10.0)
    push(queue, "new", 1, queued_s=0.0, priority=-5)
    push(queue, "again", 1, queued_s=50.0, priority=5, is_redispatch=True)
    assert order(queue) == ["again", "new"]


def test_removal_keeps_the_count_of_tokens() -> None:
    queue = WaitingQueue(ageing_s=10.0)
    entries = [push(queue, name, 10, queued_s=0.0) for name in "abc"]
    queue.remove(entries[1])
    assert (order(queue), len(queue), queue.num_tokens) == (["a", "c"], 2, 20)
    with pytest.raises(AssertionError, match="not queued"):
        queue.remove(entries[1])


def test_entries_may_be_removed_while_the_queue_is_walked() -> None:
    queue = WaitingQueue(ageing_s=1.0)
    for number in range(5):
        push(queue, number, 1, queued_s=float(number))
    for entry in queue:
        queue.remove(entry)
    assert len(queue) == queue.num_tokens == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3), st.booleans()), max_size=30))
def test_no_entry_starves_each_waits_for_bounded_many_younger_ones(
    arrivals: list[tuple[float, int, bool]],
) -> None:
    ageing_s = 5.0
    queue = WaitingQueue(ageing_s)
    for arrival in arrivals:
        push(queue, arrival, 1, arrival[0], arrival[1], is_redispatch=arrival[2])
    seen = [entry.sequences[0] for entry in queue]
    for earlier, later in itertools.pairwise(seen):
        if earlier[2] == later[2]:
            assert earlier[0] - later[0] <= ageing_s * (later[1] - earlier[1]) + 1e-9
