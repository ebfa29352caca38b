"""How many threads are worth starting: as many as this process may use processors, within its container's quota.

More threads than that would take turns and wait for each other at every phase of a step.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_processors(quota_file: Path = _QUOTA) -> int:
    """Number of processors, at least 1, whose quota is read from `quota_file`."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = (int(word) for word in quota_file.read_text().split())
    except (OSError, ValueError):  # no control group, or "max"
        return allowed
    return max(1, min(allowed, math.ceil(quota_us / period_us)))
