"""When a READ that was given up does not end: blocks stay quarantined, until the agent is recreated."""

import queue
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from pdserve.errors import TransferError
from pdserve.transfer.base import Descriptor, PeerId, PullResult, PullState
from pdserve.transfer.descriptor import seal
from pdserve.transfer.peer_failures import PeerFailures
from pdserve.transfer.pull import PullRequest, split_into_reads
from pdserve.transfer.pull_rounds import PullRounds
from pdserve.transfer.puller import Puller

BLOCK_BYTES = 1024
DEAF = "deaf"
GOOD = "good"


def descriptor(worker_id):
    return seal(
        Descriptor(
            backend="stubborn",
            worker_id=worker_id,
            generation="g1",
            num_blocks=100,
            block_bytes=BLOCK_BYTES,
            kv_signature="s",
            payload=b"",
        )
    )


class StubbornTransport:
    """READs from the deaf peer never end; others end in the next poll but one. Aborting is no fence."""

    name = "stubborn"

    def __init__(self):
        self.reads = {}
        self.num_handles = 0
        self.connected = set()
        self.num_recreated = 0
        self.is_broken = False
        self.is_good_slow = False
        self.on_poll = lambda: None
        self.log, self.aborted = [], []

    def start_connect(self, peer_descriptor):
        self.connected.add(peer_descriptor.peer)

    def is_connected(self, peer):
        return peer in self.connected

    def pull(self, peer, nonce, remote_ids, local_ids, deadline_s):
        self.num_handles += 1
        self.reads[self.num_handles] = (peer, len(local_ids))
        self.log.append((peer.worker_id, list(local_ids)))
        return self.num_handles

    def poll(self):
        self.on_poll()
        ended = [h for h, (peer, _) in self.reads.items() if peer.worker_id == GOOD and not self.is_good_slow]
        return [PullResult(h, PullState.DONE, num_bytes=self.reads.pop(h)[1] * BLOCK_BYTES) for h in ended]

    def abort(self, handle):
        self.aborted.append(handle)
        return handle not in self.reads

    def disconnect(self, peer):
        self.connected.discard(peer)

    def another_reader(self):
        self.other = StubbornTransport()
        return self.other

    def recreate(self):
        self.reads.clear()
        self.connected.clear()
        self.num_recreated += 1
        if self.is_broken:
            raise TransferError("lookup", "NIXL's UCX backend does not start here")
        return descriptor(f"new-{self.num_recreated}")

    def serve(self):
        pass

    def close(self):
        self.reads.clear()


class Scene:
    def __init__(self, max_quarantined_ratio=0.1):
        self.now_s = 100.0
        self.transport = StubbornTransport()
        self.descriptors = []
        self.rounds = PullRounds(
            {"stubborn": self.transport},
            torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8),
            faults=None,
            quarantine_s=20.0,
            max_quarantined_ratio=max_quarantined_ratio,
            max_reads_per_peer=2,
            drain_s=2.0,
            on_descriptor=self.descriptors.append,
            clock=self.clock,
        )
        self.ends, self.terminals = [], []

    def clock(self):
        return self.now_s

    def begin(self, ticket, worker_id, local_ids, within_s=5.0, digests=()):
        request = PullRequest(
            descriptor(worker_id),
            "n",
            local_ids,
            local_ids,
            list(digests),
            self.now_s + within_s,
            self.ends.append,
            self.terminals.append,
        )
        reads = split_into_reads(len(local_ids), BLOCK_BYTES, 4 * BLOCK_BYTES)
        self.rounds.begin(ticket, request, reads, request.on_end, request.on_terminal)
        return reads

    def advance(self, seconds, num_rounds=3):
        self.now_s += seconds
        for _ in range(num_rounds):
            self.rounds.round()


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
    a, b = PeerId("a", "1"), PeerId("b", "1")
    failures.note_failure(a, "copy")
    failures.note_failure(a, "timeout")
    failures.note_failure(b, "aborted")
    failures.note_failure(b, "geometry")
    assert {peer: (mark.num_failures, mark.reason) for peer, mark in failures.marks().items()} == {a: (2, "timeout")}
    assert failures.num_in_a_row == 2
    now_s[0] = 10.0
    assert failures.marks() == {}
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


@pytest.mark.parametrize("is_overdue_by", ["age", "number"])
def test_both_threads_quarantine_their_reads_and_only_the_first_agent_is_announced(is_overdue_by):
    transport, descriptors = StubbornTransport(), []
    ends, terminals = queue.Queue(), queue.Queue()
    puller = Puller(
        {"stubborn": transport},
        torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8),
        quarantine_s=0.2 if is_overdue_by == "age" else 60,
        max_quarantined_ratio=0.1 if is_overdue_by == "age" else 0.02,
        max_read_bytes=BLOCK_BYTES,
        on_descriptor=descriptors.append,
    )
    puller.start()
    ids, until_s = list(range(20)), time.monotonic() + 60
    ticket = puller.submit(PullRequest(descriptor(DEAF), "n", ids, ids, [], until_s, ends.put, terminals.put))
    while len(transport.reads) + len(transport.other.reads) < 4:  # two of each thread
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert sorted(ids for _, ids in transport.log + transport.other.log) == [[0], [1], [2], [3]]
    puller.abort(ticket)
    outcome = ends.get(timeout=5)
    assert (outcome.reason, outcome.is_terminal) == ("aborted", False)
    assert terminals.get(timeout=5) == outcome
    assert (puller.num_recreated, puller.num_quarantined_blocks) == (2, 0)
    assert [announced.worker_id for announced in descriptors] == ["new-1"]
    puller.close()
    assert (ends.qsize(), terminals.qsize()) == (0, 0)


def test_an_agent_that_does_not_come_back_leaves_its_part_to_the_other_thread():
    transport, ends, terminals = StubbornTransport(), queue.Queue(), queue.Queue()
    options = {"quarantine_s": 0.05, "max_read_bytes": BLOCK_BYTES, "max_reads_per_peer": 1}
    puller = Puller({"stubborn": transport}, torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8), **options)
    transport.other.is_broken = True
    puller.start()
    ids, until_s = [0, 1, 2, 3], time.monotonic() + 60
    ticket = puller.submit(PullRequest(descriptor(DEAF), "n", ids, ids, [], until_s, ends.put, terminals.put))
    while not transport.other.reads:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    puller.abort(ticket)
    ends.get(timeout=5)
    terminals.get(timeout=5)
    assert transport.other.num_recreated == 1
    transport.other.log.clear()
    for _ in range(5):
        puller.submit(PullRequest(descriptor(GOOD), "n", ids, ids, [], until_s, ends.put))
        assert ends.get(timeout=5).ok
    assert transport.other.log == []
    puller.close()


@pytest.mark.parametrize("attempt", range(5))  # it is a matter of which thread is faster
def test_closing_lets_the_reads_of_every_thread_end_though_another_one_has_none(attempt):
    transport, ends = StubbornTransport(), queue.Queue()
    blocks = torch.zeros((100, BLOCK_BYTES), dtype=torch.uint8)
    puller = Puller({"stubborn": transport}, blocks, max_read_bytes=BLOCK_BYTES)
    transport.start_connect = lambda peer_descriptor: None  # the first thread never gets to READ
    transport.other.is_good_slow = True
    puller.start()
    ids, until_s = [0, 1, 2, 3], time.monotonic() + 60
    puller.submit(PullRequest(descriptor(GOOD), "n", ids, ids, [], until_s, ends.put))
    while len(transport.other.reads) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    threading.Timer(0.05, lambda: setattr(transport.other, "is_good_slow", False)).start()
    puller.close()
    assert transport.other.aborted == []
    outcome = ends.get_nowait()
    assert (outcome.reason, outcome.num_bytes) == ("aborted", 2 * BLOCK_BYTES)
    assert ends.empty()


class Aside:
    """An executor whose results come when a test says so."""

    def __init__(self):
        self.verdicts = []

    def submit(self, call, *arguments):
        self.verdicts.append(Future())
        return self.verdicts[-1]


@pytest.fixture
def slow_device():
    scene = Scene()
    scene.aside = scene.rounds._verify_aside = Aside()
    return scene


@pytest.mark.parametrize("num_wrong", [0, 2])
def test_a_device_is_not_waited_for_and_its_verdict_ends_the_request(slow_device, num_wrong):
    slow_device.begin(1, GOOD, list(range(8)), digests=[bytes(16)] * 8)
    slow_device.advance(0)
    first, second = slow_device.aside.verdicts
    second.set_result(num_wrong)
    slow_device.begin(2, GOOD, [10])
    slow_device.advance(0)
    assert {outcome.ticket for outcome in slow_device.ends} == ({1, 2} if num_wrong else {2})
    first.set_result(0)
    slow_device.advance(0)
    (outcome,) = [outcome for outcome in slow_device.ends if outcome.ticket == 1]
    assert (outcome.ok, outcome.reason) == ((False, "verify") if num_wrong else (True, ""))
    assert outcome.num_bytes == (0 if num_wrong else 8 * BLOCK_BYTES)


def test_a_device_that_hangs_costs_a_request_its_deadline(slow_device):
    slow_device.begin(1, GOOD, [1], digests=[bytes(16)])
    slow_device.advance(0)
    slow_device.advance(4.9)
    assert slow_device.ends == []
    slow_device.advance(0.2)
    assert [(outcome.reason, outcome.is_terminal) for outcome in slow_device.ends] == [("timeout", True)]
    slow_device.aside.verdicts[0].set_result(0)
    slow_device.advance(0)
    assert len(slow_device.ends) == 1


def test_a_device_that_fails_verifies_nothing(slow_device):
    slow_device.begin(1, GOOD, [1], digests=[bytes(16)])
    slow_device.advance(0)
    slow_device.aside.verdicts[0].set_exception(RuntimeError("device-side assert"))
    slow_device.rounds.drain()
    (outcome,) = slow_device.ends
    assert (outcome.ok, outcome.reason) == (False, "verify")
    assert "device-side assert" in outcome.detail
