import pytest

from pdserve.messages import AttemptKey
from pdserve.prefill_worker.leases import LeaseTable

A = AttemptKey("r1", 0, 0, "nonce-a")
B = AttemptKey("r2", 0, 0, "nonce-b")


class Time:
    def __init__(self):
        self.now_s = 1000.0
        self.stood_still_s = 0.0

    def advance(self, seconds, *, disconnected=False):
        self.now_s += seconds
        self.stood_still_s += seconds if disconnected else 0.0


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def table(time):
    return LeaseTable(10.0, clock=lambda: time.now_s, stood_still_s=lambda: time.stood_still_s)


def test_a_lease_that_is_not_renewed_ends_after_one_lease(table, time):
    table.grant(A, deadline_s=time.now_s + 100)
    time.advance(9.9)
    assert table.expire() == []
    time.advance(0.1)
    assert table.expire() == [A]
    assert len(table) == 0


def test_renewal_gives_a_whole_lease_from_now(table, time):
    table.grant(A, deadline_s=time.now_s + 100)
    for _ in range(5):
        time.advance(8)
        assert table.renew(A)
        assert table.expire() == []
    time.advance(10)
    assert table.expire() == [A]


def test_granting_twice_is_one_lease(table, time):
    table.grant(A, deadline_s=time.now_s + 100)
    table.grant(A, deadline_s=time.now_s + 100)
    assert len(table) == 1
    assert table.release(A)
    assert len(table) == 0


def test_clock_stands_still_while_the_bus_reader_is_disconnected(table, time):
    table.grant(A, deadline_s=time.now_s + 1000)
    time.advance(500, disconnected=True)
    assert table.expire() == []
    time.advance(9)
    assert table.expire() == []
    time.advance(1)
    assert table.expire() == [A]


def test_deadline_of_the_request_counts_while_the_clock_stands_still(table, time):
    table.grant(A, deadline_s=time.now_s + 30)
    time.advance(30, disconnected=True)
    assert table.expire() == [A]


def test_late_notices_change_nothing(table, time):
    table.grant(A, deadline_s=time.now_s + 100)
    time.advance(11)
    assert table.expire() == [A]
    assert not table.renew(A)
    assert not table.release(A)
    assert not table.release(A)
    assert table.expire() == []


def test_leases_are_independent(table, time):
    table.grant(A, deadline_s=time.now_s + 100)
    time.advance(6)
    table.grant(B, deadline_s=time.now_s + 100)
    time.advance(4)
    assert table.expire() == [A]
    assert B in table
    assert A not in table
