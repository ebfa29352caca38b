"""How the parts of a request become one outcome. Pure: no thread, no transport."""

import dataclasses
import itertools

import pytest

from pdserve.transfer.pulls.pull import PullOutcome, PullRequest
from pdserve.transfer.pulls.shared_pull import SharedPull

GOOD = PullOutcome(7, num_bytes=100, duration_s=0.2)
IDLE = PullOutcome(7, num_bytes=0, duration_s=9.0)
BAD = PullOutcome(7, reason="copy", detail="lost", num_bytes=10, duration_s=0.1)
OPEN = PullOutcome(7, reason="timeout", duration_s=0.3, is_terminal=False)
STOPPED = PullOutcome(7, reason="aborted", duration_s=0.4)


class Log:
    """A shared request and what it said, in order."""

    def __init__(self, num_parts=2):
        self.said = []
        request = PullRequest(None, "n", [1], [1], [], 1.0, self.say("end"), self.say("terminal"))
        self.pull = SharedPull(
            request,
            num_parts,
            stop=self.say("stop"),
            note_end=lambda request, outcome: self.said.append(("note", outcome)),
        )

    def say(self, what):
        return lambda outcome: self.said.append((what, outcome))

    @property
    def words(self):
        return [what for what, _ in self.said]

    def outcome(self):
        (outcome,) = [outcome for what, outcome in self.said if what == "end"]
        return outcome


def test_the_last_part_ends_the_request():
    log = Log()
    log.pull.on_end(GOOD)
    assert log.said == []
    log.pull.on_end(dataclasses.replace(GOOD, num_bytes=50, duration_s=0.3))
    assert log.words == ["note", "end"]
    assert log.outcome() == PullOutcome(7, num_bytes=150, duration_s=0.3)


def test_a_part_that_found_nothing_to_read_says_nothing_about_the_duration():
    log = Log()
    log.pull.on_end(IDLE)
    log.pull.on_end(GOOD)
    assert log.outcome() == GOOD


@pytest.mark.parametrize("parts", list(itertools.permutations([GOOD, BAD, STOPPED])))
def test_the_first_failure_stops_the_others_and_is_the_reason(parts):
    log = Log(num_parts=3)
    for part in parts:
        log.pull.on_end(part)
    first = next(part for part in parts if not part.ok)
    assert log.words == ["stop", "note", "end"]
    assert log.said[0] == ("stop", 7)
    assert (log.outcome().ok, log.outcome().reason, log.outcome().detail) == (False, first.reason, first.detail)
    assert log.outcome().is_terminal


def test_a_request_is_terminal_when_all_its_parts_are():
    log = Log()
    log.pull.on_end(OPEN)
    log.pull.on_end(dataclasses.replace(OPEN, reason="aborted"))
    assert not log.outcome().is_terminal
    log.pull.on_terminal(OPEN)
    assert "terminal" not in log.words
    log.pull.on_terminal(OPEN)
    assert log.words == ["stop", "note", "end", "terminal"]
    assert log.said[-1][1] == log.outcome()


def test_a_part_that_became_terminal_before_the_end_is_not_told_twice():
    log = Log()
    log.pull.on_end(OPEN)
    log.pull.on_terminal(OPEN)
    log.pull.on_end(STOPPED)
    assert log.words == ["stop", "note", "end"]
    assert log.outcome().is_terminal


def test_a_callback_that_raises_leaves_no_lock_behind():
    def fail(outcome):
        raise ValueError("a defect elsewhere")

    request = PullRequest(None, "n", [1], [1], [], 1.0, fail)
    pull = SharedPull(request, 1, stop=lambda ticket: None, note_end=lambda request, outcome: None)
    with pytest.raises(ValueError, match="a defect elsewhere"):
        pull.on_end(OPEN)
    pull.on_terminal(OPEN)
