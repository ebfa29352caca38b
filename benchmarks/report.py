"""What every benchmark here hands out: rows, as a table for people and as JSON for machines, and a headline.

A row is one figure: the median of its runs unless the benchmark says otherwise. A row with a target also says whether
it was met. Never measures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.environment import describe_machine, describe_versions, source_revision

MAX_LOAD = 0.5
"""Above this load average at the start the figures come with a warning."""
_COLUMNS = ("engine", "precision", "case", "metric", "value", "unit", "range of runs", "target", "")
_RIGHT = {"value"}


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure has to reach."""

    limit: float
    is_minimum: bool

    def is_met(self, value: float) -> bool:
        """Whether the value reaches the target; NaN never does."""
        return value >= self.limit if self.is_minimum else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.is_minimum else '≤'} {self.limit:g}"


def at_least(limit: float) -> Target:
    """A target that figures of at least `limit` reach: the more, the better."""
    return Target(limit, is_minimum=True)


def at_most(limit: float) -> Target:
    """A target that figures of at most `limit` reach: the less, the better."""
    return Target(limit, is_minimum=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: what was measured of which engine, and what it has to reach."""

    engine: str
    """pdserve, or the name of a peer."""
    precision: str
    """fp32 | bf16 | int8 | q8_0 | any."""
    case: str
    metric: str
    value: float
    unit: str
    runs: tuple[float, ...]
    """The single measurements behind the value."""
    target: Target | None = None

    @property
    def verdict(self) -> str:
        """PASS or FAIL; empty without a target."""
        if self.target is None:
            return ""
        return "PASS" if self.target.is_met(self.value) else "FAIL"

    def as_dict(self) -> dict[str, Any]:
        """The figure as values for JSON, where null stands for NaN."""
        row: dict[str, Any] = {name: getattr(self, name) for name in ("engine", "precision", "case", "metric", "unit")}
        row |= {"value": _number(self.value), "runs": [_number(run) for run in self.runs]}
        return row | ({"target": str(self.target), "verdict": self.verdict} if self.target else {})


def median_row(
    engine: str, precision: str, case: str, metric: str, unit: str, runs: Sequence[float], target: Target | None = None
) -> Row:
    """The median of at least one run; runs that have no figure (NaN) do not count."""
    figures = [run for run in runs if not math.isnan(run)]
    value = statistics.median(figures) if figures else math.nan
    return Row(engine, precision, case, metric, value, unit, tuple(runs), target)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table that is aligned for a terminal."""
    cells = [list(_COLUMNS), *(_cells(row) for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(_COLUMNS))]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(line, widths) for line in [cells[0], rule, *cells[1:]])


def as_json(rows: Sequence[Row], versions: dict[str, str | None] | None = None) -> dict[str, Any]:
    """Rows with the machine and versions they were measured with.

    Args:
        versions: of peers, on top of our own.
    """
    return {
        "machine": describe_machine() | {"load_average": os.getloadavg()[0]},
        "versions": describe_versions() | (versions or {}) | {"revision": source_revision()},
        "rows": [row.as_dict() for row in rows],
    }


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A command line with what all benchmarks understand."""
    result = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    result.add_argument("--json", type=Path, metavar="FILE", help="write the figures, machine and versions")
    return result


def warn_when_busy() -> None:
    """Print a warning when other programs keep this machine busy: their work is measured too."""
    if (load := os.getloadavg()[0]) > MAX_LOAD:
        print(f"(others use this machine: load average {load:.1f}; the figures tell little)")


def publish(
    rows: Sequence[Row], headline: str, json_path: Path | None, versions: dict[str, str | None] | None = None
) -> None:
    """Print the table, write the JSON, and end with the headline as the last line."""
    print(table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(rows, versions), indent=1, ensure_ascii=False) + "\n")
    print(headline + _verdicts(rows))


def _verdicts(rows: Sequence[Row]) -> str:
    verdicts = [row.verdict for row in rows if row.target is not None]
    return f" ({verdicts.count('PASS')} of {len(verdicts)} targets met)" if verdicts else ""


def _cells(row: Row) -> list[str]:
    spread = f"{_shown(min(row.runs))}–{_shown(max(row.runs))} of {len(row.runs)}" if len(row.runs) > 1 else ""
    target = str(row.target) if row.target else ""
    named = [row.engine, row.precision, row.case, row.metric]
    return [*named, _shown(row.value), row.unit, spread, target, row.verdict]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if name in _RIGHT else cell.ljust(width)
        for cell, width, name in zip(cells, widths, _COLUMNS, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _shown(value: float) -> str:
    """The value with three significant digits, never with an exponent."""
    if math.isnan(value):
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
