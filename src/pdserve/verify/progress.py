"""What a user sees of a running verification: lines, and on a terminal a counter that rewrites itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

Item = TypeVar("Item")


class Progress:
    """Writes to one stream."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._is_terminal = out, out.isatty()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._out.write(("\r\x1b[K" if self._is_terminal else "") + text + "\n")
        self._out.flush()

    @contextlib.contextmanager
    def counting(self, title: str, num: int) -> Iterator[Callable[[], None]]:
        """Gives a function to call for each thing done."""
        done = 0

        def on_done() -> None:
            nonlocal done
            done += 1
            if self._is_terminal:
                self._out.write(f"\r\x1b[K{title}: {done}/{num}")
                self._out.flush()

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
