"""Mailboxes: what threads leave for one another, and how long their owners wait."""

import threading
import time

from pdserve.mailbox import Mailbox


def test_items_come_in_order_and_each_once():
    mailbox = Mailbox()
    for number in range(3):
        mailbox.put(number)
    assert list(mailbox.take()) == [0, 1, 2]
    assert list(mailbox.take()) == []


def test_what_arrives_while_items_are_taken_is_taken_too():
    mailbox = Mailbox()
    mailbox.put(3)
    taken = []
    for number in mailbox.take():
        taken.append(number)
        if number:
            mailbox.put(number - 1)
    assert taken == [3, 2, 1, 0]


def test_the_rest_stays_when_its_taker_fails():
    mailbox = Mailbox()
    mailbox.put("fails")
    mailbox.put("stays")
    next(mailbox.take())
    mailbox.wait()
    assert list(mailbox.take()) == ["stays"]


def test_a_wait_ends_when_an_item_comes():
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.put, ["late"]).start()
    started_s = time.monotonic()
    while not (items := list(mailbox.take())):
        mailbox.wait(30.0)
    assert items == ["late"]
    assert time.monotonic() - started_s < 20


def test_a_wait_without_items_ends_after_its_time():
    mailbox = Mailbox()
    started_s = time.monotonic()
    mailbox.wait(0.05)
    assert time.monotonic() - started_s >= 0.045
    mailbox.wait(0.0)


def test_short_waits_end_however_often_the_processor_is_taken_away():
    """A put before each wait: where `queue.SimpleQueue` waits for ever sooner or later."""
    mailbox, is_over = Mailbox(), threading.Event()

    def wait_often():
        for _ in range(20_000):
            mailbox.put(1)
            assert list(mailbox.take()) == [1]
            mailbox.wait(1e-6)
            mailbox.wait(1e-6)
        is_over.set()

    threading.Thread(target=wait_often, daemon=True).start()
    assert is_over.wait(60)


def test_nothing_is_lost_between_threads():
    mailbox, taken = Mailbox(), []

    def put_many(first):
        for number in range(20_000):
            mailbox.put((first, number))

    threads = [threading.Thread(target=put_many, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + 60
    while len(taken) < 60_000 and time.monotonic() < until_s:
        mailbox.wait(0.5)
        taken += mailbox.take()
    for first in range(3):
        assert [number for its, number in taken if its == first] == list(range(20_000))
