"""A mailbox: any thread leaves items, and one thread takes them in order and waits for them.

Not `queue.SimpleQueue`: a `get` with a time limit waits for ever where the limit passes between two of its own steps,
as it does when the processor is taken away from its thread (CPython 3.11; one in 12,000 waits of half a millisecond).
`queue.Queue` and `threading.Event` do not, but run a lot of Python on either side.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`put` belongs to any thread, everything else to the one that owns it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._putting = threading.Lock()
        self._no_news = threading.Lock()
        self._no_news.acquire()

    def put(self, item: T) -> None:
        """Leave an item, and wake the owner up."""
        with self._putting:
            self._items.append(item)
            if self._no_news.locked():
                self._no_news.release()

    def take(self) -> Iterator[T]:
        """Items in the order they came, with those that come meanwhile, until there are none. Never waits."""
        while self._items:
            yield self._items.popleft()

    def wait(self, longest_s: float = -1.0) -> None:
        """Return when there are items, or after so many seconds (-1: never); now and then earlier, for no reason."""
        if not self._items:
            self._no_news.acquire(timeout=longest_s)
