"""When a READ that was given up does not end: blocks stay quarantined, until the agent is recreated."""

import pytest
from stubborn import BLOCK_BYTES, DEAF, GOOD, Scene

from pdserve.registration import WorkerRef
from pdserve.transfer.base import PullResult, PullState
from pdserve.transfer.pulls.peer_failures import PeerFailures


@pytest.fixture
def scene():
    return Scene()


def test_blocks_of_a_timed_out_read_stay_quarantined_for_two_leases_then_the_agent_is_recreated(scene):
    scene.begin(1, DEAF, [1, 2, 3])
    scene.advance(0)
    scene.advance(6)
    (outcome,) = scene.ends
    assert (outcome.ok, outcome.reason, outcome.is_terminal) == (False, "timeout", False)
    assert scene.rounds.num_quarantined_blocks == 3
    scene.advance(19)
    assert scene.transport.num_recreated == 0
    assert scene.terminals == []
    scene.advance(1)
    assert scene.transport.num_recreated == 1
    assert scene.terminals == [outcome]
    assert scene.rounds.num_quarantined_blocks == 0
    assert [announced.worker_id for announced in scene.descriptors] == ["new-1"]
    scene.advance(100)
    assert (len(scene.ends), len(scene.terminals), scene.transport.num_recreated) == (1, 1, 1)


def test_more_than_a_tenth_of_the_pool_is_not_waited_for(scene):
    for ticket in range(3):
        scene.begin(ticket, DEAF, list(range(4 * ticket, 4 * ticket + 4)))
        scene.advance(0)
        scene.rounds.abort(ticket)
    assert [outcome.is_terminal for outcome in scene.ends] == [False] * 3
    scene.advance(0)
    assert scene.transport.num_recreated == 1
    assert sorted(outcome.ticket for outcome in scene.terminals) == [0, 1, 2]


def test_a_tenth_of_the_pool_is_waited_for(scene):
    scene.begin(1, DEAF, list(range(8)))
    scene.advance(0)
    scene.rounds.abort(1)
    scene.advance(10)
    assert (scene.rounds.num_quarantined_blocks, scene.transport.num_recreated) == (8, 0)


def test_healthy_reads_may_end_before_the_agent_goes_and_others_wait_meanwhile(scene):
    scene.begin(1, DEAF, [1])
    scene.advance(0)
    scene.rounds.abort(1)
    scene.now_s += 20
    scene.transport.is_good_slow = True
    scene.begin(2, GOOD, [10])
    scene.advance(0, num_rounds=1)  # posts, then the quarantine is found overdue
    scene.begin(3, GOOD, [11])
    scene.advance(1)
    assert scene.transport.num_recreated == 0
    assert (GOOD, [11]) not in scene.transport.log, "nothing new is posted while the agent drains"
    scene.transport.is_good_slow = False
    scene.advance(0)
    assert scene.transport.num_recreated == 1
    scene.advance(0)
    assert {outcome.ticket for outcome in scene.ends if outcome.ok} == {2, 3}


def test_reads_lost_with_the_agent_are_repeated(scene):
    scene.begin(1, DEAF, [1])
    scene.advance(0)
    scene.rounds.abort(1)
    scene.now_s += 20
    scene.transport.is_good_slow = True
    scene.begin(2, GOOD, list(range(10, 22)), within_s=60)
    scene.advance(0)
    posted = list(scene.transport.log)
    scene.advance(2)
    assert scene.transport.num_recreated == 1
    scene.transport.is_good_slow = False
    scene.advance(0, num_rounds=6)
    (outcome,) = [outcome for outcome in scene.ends if outcome.ticket == 2]
    assert outcome.ok
    assert outcome.num_bytes == 12 * BLOCK_BYTES
    repeated = scene.transport.log[len(posted) :]
    assert sorted(block_id for _, ids in repeated for block_id in ids) == list(range(10, 22))


def test_a_quarantined_read_that_ends_by_itself_needs_no_teardown(scene):
    scene.begin(1, DEAF, [1, 2])
    scene.advance(0)
    scene.rounds.abort(1)
    (handle,) = scene.transport.reads
    scene.transport.reads.clear()
    late = PullResult(handle, PullState.FAILED, "aborted", is_terminal=True)
    scene.transport.poll = lambda: [late] if not scene.terminals else []
    scene.advance(1)
    assert [outcome.ticket for outcome in scene.terminals] == [1]
    scene.advance(100)
    assert scene.transport.num_recreated == 0


def test_late_and_unknown_results_are_ignored(scene):
    results = [PullResult(999, PullState.DONE), PullResult(998, PullState.FAILED, "copy", is_terminal=False)]
    scene.transport.poll = lambda: results
    scene.advance(0)
    assert (scene.ends, scene.terminals, scene.rounds.num_quarantined_blocks) == ([], [], 0)


def test_an_agent_that_does_not_come_back_still_ends_the_quarantine(scene):
    scene.transport.is_broken = True
    scene.begin(1, DEAF, [1])
    scene.advance(0)
    scene.rounds.abort(1)
    scene.advance(20)
    assert [outcome.ticket for outcome in scene.terminals] == [1]
    assert scene.descriptors == []
    scene.advance(100)
    assert scene.transport.num_recreated == 1


def test_tearing_down_makes_everything_terminal(scene):
    scene.begin(1, DEAF, [1, 2])
    scene.begin(2, DEAF, [3])
    scene.advance(0)
    scene.rounds.abort(1)
    scene.transport.on_poll = lambda: setattr(scene, "now_s", scene.now_s + 1)
    scene.rounds.drain()
    assert scene.now_s == 102.0
    scene.rounds.tear_down()
    assert sorted(outcome.ticket for outcome in scene.ends) == [1, 2]
    assert sorted(outcome.ticket for outcome in scene.terminals) == [1, 2]


def test_one_peer_never_has_more_reads_on_their_way_than_allowed(scene):
    scene.transport.is_good_slow = True
    scene.begin(1, GOOD, list(range(40)))
    scene.begin(2, GOOD, list(range(40, 80)))
    scene.advance(0, num_rounds=10)
    assert len(scene.transport.reads) == 2


def test_failure_marks_fade():
    now_s = [0.0]
    failures = PeerFailures(10.0, lambda: now_s[0])
    a, b = WorkerRef("a", "1"), WorkerRef("b", "1")
    failures.note_failure(a, "copy")
    failures.note_failure(a, "timeout")
    failures.note_failure(b, "aborted")
    failures.note_failure(b, "geometry")
    assert failures.peers() == {a}
    assert failures.num_in_a_row == 2
    now_s[0] = 10.0
    assert failures.peers() == frozenset()
    failures.note_success(b)
    assert failures.num_in_a_row == 0


def test_a_lone_request_is_read_in_one_go(scene):
    scene.begin(1, GOOD, list(range(12)))
    scene.advance(0, num_rounds=1)
    assert [ids for _, ids in scene.transport.log] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [outcome.num_bytes for outcome in scene.ends] == [12 * BLOCK_BYTES]


def test_several_requests_take_turns(scene):
    scene.begin(1, GOOD, list(range(8)))
    scene.begin(2, GOOD, list(range(10, 18)))
    scene.advance(0, num_rounds=2)
    assert [ids[0] for _, ids in scene.transport.log] == [0, 10, 4, 14]
    assert [outcome.ok for outcome in scene.ends] == [True, True]


def test_a_long_request_lets_other_things_be_looked_at_every_few_milliseconds(scene):
    def copy_slowly():
        scene.now_s += 0.003

    scene.transport.on_poll = copy_slowly
    scene.begin(1, GOOD, list(range(40)))
    scene.advance(0, num_rounds=1)
    assert len(scene.transport.log) == 2
    scene.advance(0, num_rounds=10)
    assert [outcome.ok for outcome in scene.ends] == [True]


def test_a_request_that_ends_by_what_another_one_finds_out_ends_once(scene):
    scene.transport.is_good_slow = True
    scene.begin(1, GOOD, list(range(12)), within_s=60)
    scene.begin(2, DEAF, [50], within_s=5)
    scene.advance(0, num_rounds=1)
    failed = [PullResult(h, PullState.FAILED, "copy") for h, (p, _) in scene.transport.reads.items() if p[0] == DEAF]
    scene.transport.poll = lambda: [failed.pop()] if failed else []
    scene.advance(10, num_rounds=1)
    assert [(outcome.ticket, outcome.reason) for outcome in scene.ends] == [(2, "copy")]


def test_a_part_ends_when_another_thread_took_the_last_reads(scene):
    scene.transport.start_connect = lambda peer_descriptor: None  # not connected: it has READ nothing so far
    reads = scene.begin(1, GOOD, list(range(12)))
    scene.advance(0)
    assert scene.ends == []
    reads.clear()
    scene.advance(0, num_rounds=1)
    assert [(outcome.ok, outcome.num_bytes) for outcome in scene.ends] == [(True, 0)]


def test_a_part_that_fails_leaves_nothing_to_read_for_others(scene):
    scene.transport.is_good_slow = True
    reads = scene.begin(1, GOOD, list(range(40)))
    scene.advance(0)
    assert len(reads) == 8
    scene.rounds.abort(1)
    assert not reads
