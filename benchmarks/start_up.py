"""Time from `pdserve up` to the first answer, by stage: with weights of each worker's own, and with shared ones.

The model has been made before (its conversion is once, and is not a start); files are in the page cache. Processor
seconds stand beside wall time, for other programs on the machine stretch only the latter.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

import httpx
import psutil
from benchmarks.report import Row, at_most, median_row, parser, publish, warn_when_busy

FIRST_ANSWER_LIMIT_S = 20.0
_STAGES = re.compile(r"^\s*(\S+)-\d+\s+serving .* after ([\d.]+) s \((.*)\)$")
_READY = re.compile(r"Ready after ([\d.]+) s at (\S+)")
_QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 1}


@dataclass
class Start:
    """One start, as its output and its processes tell it."""

    ready_s: float = 0.0
    first_answer_s: float = 0.0
    processor_s: float = 0.0
    """Processor seconds of all processes until the first answer."""
    memory_bytes: int = 0
    """Memory of all processes, pages that several share counted once."""
    stages_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """(role, stage) → seconds; stage `total` too."""

    def read(self, line: str) -> None:
        """Take in one line of the supervisor's output."""
        if (match := _STAGES.match(line)) is not None:
            role, total_s, parts = match.groups()
            self.stages_s[role, "total"] = float(total_s)
            for part in parts.split(", "):
                stage, _, seconds = part.rpartition(" ")
                self.stages_s[role, stage] = float(seconds)


def measure(arguments: Sequence[str], number: int, timeout_s: float = 180.0) -> Start:
    """Start the service, ask it once, and stop it.

    Raises:
        RuntimeError: it was not ready in time.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pdserve",
        "up",
        "--port",
        "0",
        "--service",
        f"start-up-{number}",
        *arguments,
    ]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        return _measure(process, began_s, timeout_s)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _measure(process: subprocess.Popen[str], began_s: float, timeout_s: float) -> Start:
    start = Start()
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=_read_all, args=(process.stderr, start), daemon=True)
    reader.start()
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        url = _wait_until_ready(process.stdout, start)
    finally:
        watchdog.cancel()
    httpx.post(f"{url}/v1/chat/completions", json=_QUESTION, timeout=60).raise_for_status()
    start.first_answer_s = time.monotonic() - began_s
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        times = member.cpu_times()
        start.processor_s += times.user + times.system
        start.memory_bytes += member.memory_full_info().pss
    return start


def _wait_until_ready(stdout: IO[str], start: Start) -> str:
    for line in stdout:
        if (match := _READY.search(line)) is not None:
            start.ready_s = float(match[1])
            return match[2]
    raise RuntimeError("pdserve up ended before it was ready; run it alone to see why")


def _read_all(lines: IO[str], start: Start) -> None:
    for line in lines:
        start.read(line.rstrip())


def rows_of(case: str, precision: str, starts: Sequence[Start]) -> list[Row]:
    """Medians over the starts of one case."""
    limit = at_most(FIRST_ANSWER_LIMIT_S)
    figures = [
        median_row("pdserve", precision, case, "first answer", "s", [s.first_answer_s for s in starts], limit),
        median_row("pdserve", precision, case, "ready", "s", [s.ready_s for s in starts]),
        median_row("pdserve", precision, case, "processor time", "s", [s.processor_s for s in starts]),
        median_row("pdserve", precision, case, "memory", "MiB", [s.memory_bytes / 2**20 for s in starts]),
    ]
    for role, stage in starts[0].stages_s:
        runs = [start.stages_s[role, stage] for start in starts if (role, stage) in start.stages_s]
        figures.append(median_row("pdserve", precision, case, f"{role}: {stage}", "s", runs))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure some starts of each case, and print the figures."""
    options = _parse(argv)
    warn_when_busy()
    arguments = ["--model", options.model, "--dtype", options.dtype, *options.arguments]
    precision = {"float32": "fp32", "bfloat16": "bf16"}.get(options.dtype, "any")
    rows: list[Row] = []
    number = 0
    for case, mode in (("own weights", "off"), ("shared weights", "on")):
        starts = []
        for _ in range(options.runs + 1):  # the first one fills caches, and packs what is to be shared
            starts.append(measure([*arguments, "--share-weights", mode], number))
            number += 1
        rows += rows_of(case, precision, starts[1:])
    named = {(row.case, row.metric): row.value for row in rows}
    headline = (
        f"start-up: first answer {named['own weights', 'first answer']:.1f} s after `pdserve up` "
        f"({named['own weights', 'processor time']:.1f} s of processor time; "
        f"shared weights {named['shared weights', 'first answer']:.1f} s)"
    )
    publish(rows, headline, options.json)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    result = parser("start_up", "Time from `pdserve up` to the first answer, by stage.")
    result.add_argument("--model", default="demo", help="as the setting MODEL (demo)")
    result.add_argument("--dtype", default="float32", help="as the setting DTYPE (float32)")
    result.add_argument("--runs", type=int, default=3, help="starts of each kind, beside one that warms up (3)")
    result.add_argument("arguments", nargs="*", help="more arguments of `pdserve up`, after --")
    return result.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
