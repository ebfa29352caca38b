"""Linear fits with coefficients that are never negative, for a handful of measurements and at most a few columns.

Residuals are relative, (predicted - measured) / measured: a measurement that took ten times too long, because the
machine was busy, weighs no more than one that is all wrong. Columns that explain next to nothing get 0, so that
two columns that always grew together are not told apart by noise. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_SIZE_PENALTY = 0.05
"""A further column must lower the squared error by about this share."""
_NOISE_VARIANCE = 1e-4
"""Relative errors of one per cent are noise: no column is added to explain them."""

Row = Sequence[float]


@dataclass(frozen=True, slots=True)
class LinearFit:
    """`measured ≈ Σ coefficients[i] · row[i]`."""

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    """Relative error of each measurement, signed."""

    @property
    def rms_error(self) -> float:
        """Root mean square of the relative errors."""
        return math.sqrt(sum(error * error for error in self.errors) / len(self.errors))


def fit_nonnegative(rows: Sequence[Row], measured: Sequence[float]) -> LinearFit:
    """The best fit over all sets of columns whose coefficients come out positive; earlier columns win ties.

    Args:
        rows: at least one, of equal length.
        measured: positive, one per row.
    """
    assert rows, "no measurements"
    assert min(measured) > 0, measured
    scaled = [[value / y for value in row] for row, y in zip(rows, measured, strict=True)]
    num_columns = len(rows[0])
    columns = list(zip(*scaled, strict=True))
    gram = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in columns] for x in columns]
    moments = [sum(column) for column in columns]  # the right side is 1 for every row
    best, best_score = (0.0,) * num_columns, math.inf
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            solution = _solve([[gram[i][j] for j in chosen] for i in chosen], [moments[i] for i in chosen])
            if solution is None or min(solution) <= 0:
                continue
            explained = sum(value * moments[i] for i, value in zip(chosen, solution, strict=True))
            score = _score((len(rows) - explained) / len(rows), size)
            if score < best_score:
                values = dict(zip(chosen, solution, strict=True))
                best, best_score = tuple(values.get(i, 0.0) for i in range(num_columns)), score
    errors = (sum(value * c for value, c in zip(row, best, strict=True)) - 1 for row in scaled)
    return LinearFit(best, tuple(errors))


def fit_robustly(rows: Sequence[Row], measured: Sequence[float]) -> LinearFit:
    """Like `fit_nonnegative`, but once more without the measurements that were far off. Errors of the rest."""
    fit = fit_nonnegative(rows, measured)
    spread = sorted(abs(error) for error in fit.errors)[len(fit.errors) // 2]
    kept = [index for index, error in enumerate(fit.errors) if abs(error) <= max(3 * spread, 0.1)]
    if len(kept) == len(rows):
        return fit
    return fit_nonnegative([rows[index] for index in kept], [measured[index] for index in kept])


def _score(mean_square_error: float, num_columns: int) -> float:
    return (max(0.0, mean_square_error) + _NOISE_VARIANCE) * (1 + _SIZE_PENALTY * num_columns)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination of a small symmetric system, columns scaled to 1; None when it is singular."""
    size = len(right)
    if min(matrix[i][i] for i in range(size)) <= 0:
        return None
    scale = [1 / math.sqrt(matrix[i][i]) for i in range(size)]
    rows = [[*(matrix[i][j] * scale[i] * scale[j] for j in range(size)), right[i] * scale[i]] for i in range(size)]
    for i in range(size):  # positive definite: no pivoting needed
        if rows[i][i] < 1e-9:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return [value * s for value, s in zip(solution, scale, strict=True)]
