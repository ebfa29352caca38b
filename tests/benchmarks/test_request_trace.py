"""The way of one chat request through the gateway's files stays short."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.request_trace import trace_requests

MAX_FILES, MAX_CHANGES, MAX_DISPATCHER_ENTRIES = 20, 500, 3


def test_a_chat_request_runs_through_few_files_of_the_gateway(redis_url: str, tiny_model_dir: Path) -> None:
    trace = asyncio.run(trace_requests(redis_url, tiny_model_dir))
    assert trace.num_files <= MAX_FILES, sorted(set(trace.files))
    assert trace.num_changes <= MAX_CHANGES
    assert trace.num_dispatcher_entries <= MAX_DISPATCHER_ENTRIES
