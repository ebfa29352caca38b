"""Digests of a device's blocks are computed aside: no round waits for them."""

from concurrent.futures import Future

import pytest
from stubborn import BLOCK_BYTES, GOOD, Scene


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
    assert (outcome.ok, outcome.reason) == ((False, "verify") if num_wrong else (True, None))
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
