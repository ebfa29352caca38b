"""Histogram borders. A quantile is only as good as the borders around it, and an SLO must be one of them."""

from __future__ import annotations

from collections.abc import Sequence

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
          1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
ITL_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
         0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)  # fmt: skip
REQUEST_S = (*TTFT_S, 160.0, 320.0, 640.0)
"""A whole request lasts up to its deadline."""
STAGE_S = tuple(0.0005 * 2**n for n in range(17))
BYTES = tuple(float(1024 * 4**n) for n in range(12))
"""Sizes from 1 KiB to 4 GiB, each four times the one before."""
COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Numbers of tokens or sequences: 1, 2, 5, 10 … 500,000."""


def with_thresholds(buckets: Sequence[float], *thresholds: float | None) -> tuple[float, ...]:
    """The borders with these targets among them; None stands for no target."""
    return tuple(sorted({*buckets, *(threshold for threshold in thresholds if threshold is not None)}))
