"""One request whose READs several transfer threads take from one queue, put together again as one outcome."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from pdserve.transfer.pulls.pull import PullOutcome, PullRequest, Ticket


class SharedPull:
    """Hears how the parts end, in any thread, and calls the request's own callbacks once each.

    The callbacks run in the thread whose part comes last, `on_terminal` never before `on_end`.

    Args:
        num_parts: threads that will each end their part exactly once.
        stop: ends the other parts; called at the first failure, never blocks.
        note_end: called just before the request's own `on_end`.
    """

    def __init__(
        self,
        request: PullRequest,
        num_parts: int,
        stop: Callable[[Ticket], None],
        note_end: Callable[[PullRequest, PullOutcome], None],
    ) -> None:
        self._request, self._num_parts = request, num_parts
        self._stop, self._note_end = stop, note_end
        self._lock = threading.Lock()
        self._ends: list[PullOutcome] = []
        self._failure: PullOutcome | None = None
        self._num_unended = 0
        self._outcome: PullOutcome | None = None

    def on_end(self, part: PullOutcome) -> None:
        """A thread's part ended; the last one ends the request."""
        with self._lock:
            self._ends.append(part)
            self._num_unended += not part.is_terminal
            if not part.ok and self._failure is None:
                self._failure = part
                self._stop(part.ticket)
            if len(self._ends) == self._num_parts:
                self._outcome = self._merge_ends()
                self._note_end(self._request, self._outcome)
                self._request.on_end(self._outcome)

    def on_terminal(self, part: PullOutcome) -> None:
        """A thread's part became terminal that was not when it ended."""
        with self._lock:
            self._num_unended -= 1
            if self._outcome is not None and self._num_unended == 0:
                self._request.on_terminal(self._outcome)

    def _merge_ends(self) -> PullOutcome:
        """One outcome: as bad as the first failure, and as long as the longest part that READ something."""
        told = self._failure or self._ends[0]
        return dataclasses.replace(
            told,
            num_bytes=sum(part.num_bytes for part in self._ends),
            duration_s=max([part.duration_s for part in self._ends if part.num_bytes] or [told.duration_s]),
            is_terminal=self._num_unended == 0,
        )
