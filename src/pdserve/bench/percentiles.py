"""Distributions of measured values: mean and percentiles, as numpy computes them. Never sees a clock.

Linear interpolation between closest ranks (numpy's default), so that a published p99 can be recomputed
from the raw values with any statistics package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the ascending `ordered` lies; NaN when there is none."""
    assert 0.0 <= share <= 1.0, share
    if not ordered:
        return math.nan
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a report shows of many values. All NaN when there were none."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """The distribution of `values`, in any order."""
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.50, 0.90, 0.95, 0.99))
        return cls(len(ordered), mean, p50, p90, p95, p99, ordered[-1] if ordered else math.nan)

    def as_dict(self) -> dict[str, float | None]:
        """JSON has no NaN: absent numbers are null."""
        return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in asdict(self).items()}
