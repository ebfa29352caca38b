"""Reads request traces (arrival, input length, output length) from csv, csv.gz, jsonl and jsonl.xz files.

Columns are found by name, whatever their spelling; arrivals may be seconds, milliseconds or dates. A file
that cannot be read that way is an error that names the columns found. Traces whose timestamps are
quantised (many requests share one) are spread uniformly inside their bin, reproducibly. Never sends anything.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdserve.errors import PdserveError


class TraceError(PdserveError):
    """A trace file cannot be read; the message names the file and what was found."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    """Seconds after the first request of the trace."""
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace, ascending by arrival, and how its file was understood."""

    requests: tuple[TraceRequest, ...]
    columns: tuple[str, str, str]
    """Names of the arrival, input and output column."""
    unit: str
    """The unit that arrivals were in: s, ms, us, ns or date."""
    bin_s: float
    """Width of the bins over which quantised arrivals were spread; 0 = they were not quantised."""


_ARRIVAL = (r"^(arrival|arrived|timestamp|time|date|start)", r"(arrival|timestamp)")
_INPUT = (r"^(num)?(input|prompt|context|request)(tokens?|len|length|size)", r"^(num)?(input|prompt|context)")
_OUTPUT = (
    r"^(num)?(output|generated|generation|response|completion)(tokens?|len|length|size)",
    r"^(num)?(output|generated|generation|response|completion)",
)
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_MIN_SHARED_RATIO = 0.2
"""A trace is quantised when at least this share of its requests has the timestamp of an earlier one."""
_MAX_MEAN_GAP = 20.0
"""Plain numbers with a larger mean gap are milliseconds: services with one request per 20 s need no load test."""


def read_trace(path: Path, *, unit: str = "auto", seed: int = 0) -> Trace:
    """Read a trace file.

    Args:
        path: .csv or .jsonl, plain or compressed with gzip or xz.
        unit: unit of numeric arrivals: s, ms, us, ns or auto, which goes by the column's suffix, then by size.
        seed: equal seeds spread requests equally inside quantised bins.

    Raises:
        TraceError: unknown kind of file, a column missing or ambiguous, or a value that is no number.
    """
    rows = list(_rows(path))
    if not rows:
        raise TraceError(f"{path.name}: the file has no rows")
    columns = _find_columns(path, list(rows[0]))
    arrivals_s, unit = _to_seconds([_cell(path, row, columns[0]) for row in rows], columns[0], unit, path)
    inputs, outputs = ([_count(path, row, column) for row in rows] for column in columns[1:])
    first_s = min(arrivals_s)
    requests = sorted(
        (TraceRequest(at_s - first_s, i, o) for at_s, i, o in zip(arrivals_s, inputs, outputs, strict=True)),
        key=lambda request: request.at_s,
    )
    bin_s = quantisation_s([request.at_s for request in requests])
    return Trace(tuple(spread(requests, bin_s, seed)), columns, unit, bin_s)


def quantisation_s(ordered: list[float]) -> float:
    """Width of the bins that ascending arrivals fall into; 0 when they are not quantised."""
    distinct = sorted(set(ordered))
    if len(distinct) < 2 or 1 - len(distinct) / len(ordered) < _MIN_SHARED_RATIO:
        return 0.0
    gaps = [after - before for before, after in itertools.pairwise(distinct)]
    return statistics.quantiles(gaps, n=20)[0] if len(gaps) > 1 else gaps[0]


def spread(requests: list[TraceRequest], bin_s: float, seed: int) -> list[TraceRequest]:
    """The same requests, each moved to a uniformly drawn place inside its bin, ascending."""
    if not bin_s:
        return requests
    draw = random.Random(seed)
    moved = [replace(request, at_s=request.at_s + draw.random() * bin_s) for request in requests]
    return sorted(moved, key=lambda request: request.at_s)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packed = suffixes[-1] if suffixes and suffixes[-1] in (".gz", ".xz") else ""
    kind = suffixes[-2] if packed and len(suffixes) > 1 else (suffixes[-1] if suffixes else "")
    if kind not in (".csv", ".jsonl"):
        raise TraceError(f"{path.name}: expected .csv, .csv.gz, .jsonl or .jsonl.xz")
    opener: Any = {"": open, ".gz": gzip.open, ".xz": lzma.open}[packed]
    try:
        with opener(path, "rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as lines:
            yield from csv.DictReader(lines) if kind == ".csv" else _json_rows(path, lines)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path.name}: cannot be read: {error}") from error


def _json_rows(path: Path, lines: io.TextIOWrapper) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path.name}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path.name}: line {number} is not a JSON object")
        yield row


def _find_columns(path: Path, names: list[str]) -> tuple[str, str, str]:
    arrival, num_input, num_output = (_find(names, patterns) for patterns in (_ARRIVAL, _INPUT, _OUTPUT))
    if arrival is None or num_input is None or num_output is None:
        missing = [
            what
            for what, name in (
                ("arrival (arrival, timestamp)", arrival),
                ("input length (input, prompt, context)", num_input),
                ("output length (output, generated)", num_output),
            )
            if name is None
        ]
        raise TraceError(f"{path.name}: no single column for {', '.join(missing)}; columns found: {', '.join(names)}")
    return arrival, num_input, num_output


def _find(names: list[str], patterns: tuple[str, ...]) -> str | None:
    """The one name that the first matching pattern matches; None when there is none, or more than one."""
    for pattern in patterns:
        matches = [name for name in names if re.search(pattern, re.sub(r"[^a-z0-9]", "", str(name).lower()))]
        if matches:
            return matches[0] if len(matches) == 1 else None
    return None


def _cell(path: Path, row: dict[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None or value == "":
        raise TraceError(f"{path.name}: a row has no {column}; columns found: {', '.join(map(str, row))}")
    return value


def _count(path: Path, row: dict[str, Any], column: str) -> int:
    value = _cell(path, row, column)
    try:
        return max(0, int(float(value)))
    except (TypeError, ValueError, OverflowError):
        found = ", ".join(map(str, row))
        raise TraceError(f"{path.name}: {column} is {value!r}, expected tokens; columns found: {found}") from None


def _to_seconds(values: list[Any], column: str, unit: str, path: Path) -> tuple[list[float], str]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        try:
            return [_date_s(str(value)) for value in values], "date"
        except ValueError as error:
            raise TraceError(f"{path.name}: {column} is neither a number nor a date: {error}") from error
    unit = _guess_unit(numbers, column) if unit == "auto" else unit
    return [number * _UNITS[unit] for number in numbers], unit


def _date_s(text: str) -> float:
    # datetime reads at most six decimals, traces of 100 ns ticks have seven.
    date = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip()))
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _guess_unit(numbers: list[float], column: str) -> str:
    suffix = re.search(r"(?:_|\b)(s|sec|seconds|ms|us|ns)\)?$", column.lower())
    if suffix:
        return suffix[1] if suffix[1] in _UNITS else "s"
    for floor, unit in ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e8, "s")):  # of an epoch since 1973
        if min(numbers) >= floor:
            return unit
    mean_gap = (max(numbers) - min(numbers)) / max(1, len(numbers) - 1)
    return "ms" if mean_gap > _MAX_MEAN_GAP else "s"
