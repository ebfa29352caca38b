"""`pdserve bench`: load test of any OpenAI-compatible server. Thin: parse, measure, print, write."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.bench.benchmark import run_benchmark
from pdserve.bench.options import parse_options
from pdserve.bench.progress import Progress
from pdserve.bench.report import as_json, table
from pdserve.errors import PdserveError
from pdserve.local.find_service import service_url


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 when there were answers, 1 when nothing could be measured, 2 for bad flags."""
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        url = service_url(options.url, options.service, os.environ)
        progress = Progress(sys.stderr)
        api_key = os.environ.get("OPENAI_API_KEY")
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            result = runner.run(run_benchmark(options, url, api_key, _note, progress))
    except PdserveError as error:
        print(f"pdserve bench: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("pdserve bench: interrupted, nothing was recorded", file=sys.stderr)
        return 130
    print(table(result, options))
    if options.json_path is not None and not _written(options.json_path, as_json(result, options)):
        return 1
    return 1 if result.median.num_failed == result.median.num_sent else 0


def _written(path: Path, report: dict[str, Any]) -> bool:
    try:
        path.write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"pdserve bench: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return False
    print(f"written: {path}")
    return True


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415  exists on POSIX only

    return uvloop.new_event_loop
