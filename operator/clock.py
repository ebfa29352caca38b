"""The two clocks that the operator reads, as one object that tests can turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """A clock to compare with the cluster's timestamps, and one that no administrator ever sets."""

    wall_s: Callable[[], float] = time.time
    """Seconds since the epoch."""
    steady_s: Callable[[], float] = time.monotonic
    """Seconds since some moment; for durations."""

    def now_text(self) -> str:
        """The wall clock as the API writes it."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.wall_s()))
