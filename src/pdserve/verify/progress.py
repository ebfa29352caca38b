"""What a user sees of a running verification: lines, and a counter that rewrites itself on a terminal.

Where it cannot rewrite itself (a file, CI), the counter is a line now and then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

Item = TypeVar("Item")

_LINE_INTERVAL_S = 20.0
"""Seconds between the lines of a counter."""


class Progress:
    """Lines and counters on one stream."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._is_terminal, self._clock = out, out.isatty(), clock

    def line(self, text: str) -> None:
        """Write a line that stays."""
        self._out.write(("\r\x1b[K" if self._is_terminal else "") + text + "\n")
        self._out.flush()

    @contextlib.contextmanager
    def counting(self, title: str, num: int) -> Iterator[Callable[[], None]]:
        """Gives a function to call for each thing done."""
        done, said_s = 0, self._clock()

        def on_done() -> None:
            nonlocal done, said_s
            done += 1
            if self._is_terminal:
                self._out.write(f"\r\x1b[K{title}: {done}/{num}")
                self._out.flush()
            elif self._clock() - said_s >= _LINE_INTERVAL_S:
                said_s = self._clock()
                self.line(f"{title}: {done}/{num}")

        try:
            yield on_done
        finally:
            if self._is_terminal:
                self._out.write("\r\x1b[K")

    def over(self, items: Sequence[Item], title: str) -> Iterable[Item]:
        """The items, counted as they are used; a line before long work where no counter can be shown."""
        if items and not self._is_terminal:
            self.line(f"{title}: {len(items)} to compute")
        with self.counting(title, len(items)) as on_done:
            for item in items:
                yield item
                on_done()
