"""How long each stage of a worker's start took, from the birth of its process to the moment it serves."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def process_age_s() -> float:
    """Seconds since this process was born: interpreter and imports, when asked first."""
    return max(0.0, time.time() - psutil.Process().create_time())


class StartStages:
    """Notes stages, one after the other.

    Args:
        age_s: of the process now; it becomes the first stage, `imports`.
        clock: monotonic seconds.
    """

    def __init__(self, age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {"imports": age_s}
        """By stage, in order."""
        self._clock = clock
        self._last_s = clock()

    def done(self, stage: str) -> None:
        """What happened since the last stage was this one."""
        now_s = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def total_s(self) -> float:
        """Since the birth of the process."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
        return f"{self.total_s:.2f} s ({parts})"
