from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pdserve.bench.percentiles import Distribution, percentile


@pytest.mark.parametrize("num_values", [1, 2, 3, 10, 99, 100, 101, 1234])
def test_percentiles_equal_numpys(num_values: int) -> None:
    draw = random.Random(num_values)
    values = [draw.lognormvariate(0, 1) for _ in range(num_values)]
    ordered = sorted(values)
    for share in (0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0):
        assert percentile(ordered, share) == pytest.approx(float(np.percentile(values, share * 100)), rel=1e-12)


def test_a_distribution_equals_numpys_numbers_in_any_order() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.5, 0.25]
    d = Distribution.of(values)
    assert (d.num, d.max) == (6, 5.0)
    assert d.mean == pytest.approx(np.mean(values))
    for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert getattr(d, name) == pytest.approx(np.percentile(values, q))


def test_nothing_measured_is_nan_and_null_in_json() -> None:
    d = Distribution.of([])
    assert d.num == 0
    assert math.isnan(d.p50)
    assert d.as_dict()["p50"] is None
