from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from pdserve.bench.traces import TraceError, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,3180,8\n"
)


def lengths(trace) -> list[tuple[int, int]]:
    return [(r.num_input_tokens, r.num_output_tokens) for r in trace.requests]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_dates_and_azure_columns_are_understood(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(AZURE.encode()) if name.endswith("gz") else AZURE.encode())
    trace = read_trace(path)
    assert trace.unit == "date"
    assert [r.at_s for r in trace.requests] == pytest.approx([0.0, 1.5])
    assert lengths(trace) == [(4808, 10), (3180, 8)]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz"])
def test_quantised_milliseconds_are_spread_inside_their_bin(tmp_path: Path, name: str) -> None:
    rows = [{"timestamp": 3000 * (i // 10), "input_length": i, "output_length": 5, "hash_ids": [1]} for i in range(100)]
    raw = "\n".join(map(json.dumps, rows)).encode()
    path = tmp_path / name
    path.write_bytes(lzma.compress(raw) if name.endswith("xz") else raw)
    trace = read_trace(path, seed=1)
    assert (trace.unit, trace.bin_s) == ("ms", pytest.approx(3.0))
    arrivals = [r.at_s for r in trace.requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 100
    assert all(r.num_input_tokens // 10 == int(r.at_s // 3.0) for r in trace.requests), "nobody leaves his bin"
    assert read_trace(path, seed=1) == trace
    assert read_trace(path, seed=2) != trace


def test_single_timestamps_are_left_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0.5,1,2\n2.5,3,4\n1.0,5,6\n")
    trace = read_trace(path)
    assert trace.bin_s == 0.0
    assert [r.at_s for r in trace.requests] == pytest.approx([0.0, 0.5, 2.0])
    assert lengths(trace) == [(1, 2), (5, 6), (3, 4)]


@pytest.mark.parametrize(
    ("header", "first", "second", "gap_s"),
    [
        ("timestamp", "0", "2", 2.0),
        ("timestamp", "0", "2000", 2.0),
        ("arrival_ms", "0", "2", 0.002),
        ("arrival_time_s", "0", "2000", 2000.0),
        ("Timestamp", "1700000000", "1700000002", 2.0),
        ("Timestamp", "1700000000000", "1700000002000", 2.0),
        ("arrived_at", "2024-01-01T00:00:00Z", "2024-01-01T00:00:02+00:00", 2.0),
    ],
)
def test_units_are_found(tmp_path: Path, header: str, first: str, second: str, gap_s: float) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header},prompt_tokens,output_tokens\n{first},1,2\n{second},3,4\n")
    assert read_trace(path).requests[1].at_s == pytest.approx(gap_s)


def test_a_given_unit_wins(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("timestamp,prompt_tokens,output_tokens\n0,1,2\n2000,3,4\n")
    assert read_trace(path, unit="s").requests[1].at_s == 2000.0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", "when,how_much\n1,2\n", ["arrival", "input", "output", "when, how_much"]),
        ("t.csv", "timestamp,prompt_tokens,reply\n1,2,3\n", ["output", "timestamp, prompt_tokens, reply"]),
        ("t.csv", "timestamp,input_tokens,prompt_tokens,output\n1,2,3,4\n", ["input", "input_tokens, prompt_tokens"]),
        ("t.csv", "timestamp,prompt,output\n1,hello there,3\n", ["hello there", "timestamp, prompt, output"]),
        ("t.csv", "timestamp,prompt,output\nsoon,1,3\n", ["neither a number nor a date"]),
        ("t.csv", "timestamp,prompt,output\n1,,3\n", ["no prompt"]),
        ("t.csv", "", ["no rows"]),
        ("t.jsonl", "{}\nnot json\n", ["line 2"]),
        ("t.jsonl", "[1]\n", ["line 1", "object"]),
        ("t.parquet", "x", ["expected .csv"]),
        ("t.csv.gz", "not gzip", ["cannot be read"]),
    ],
)
def test_a_bad_file_is_an_error_that_names_what_was_found(
    tmp_path: Path, name: str, content: str, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    for word in [name, *words]:
        assert word in str(error.value)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.skipif("PDS_TRACES" not in os.environ, reason="PDS_TRACES names no folder of public traces")
@pytest.mark.parametrize(
    ("name", "num_requests", "span_min", "mean_input", "mean_output"),
    [
        ("azure2023_code.csv.gz", 8_819, 57.3, 2048, 27.9),
        ("azure2023_conv.csv.gz", 19_366, 58.4, 1155, 211),
        ("mooncake_conversation.jsonl.xz", 12_031, 59.0, 12_035, 343),
    ],
)
def test_public_traces_are_read_with_the_numbers_that_their_publishers_state(
    name: str, num_requests: int, span_min: float, mean_input: float, mean_output: float
) -> None:
    trace = read_trace(Path(os.environ["PDS_TRACES"]) / name)
    inputs, outputs = zip(*lengths(trace), strict=True)
    assert len(trace.requests) == num_requests
    assert trace.requests[-1].at_s / 60 == pytest.approx(span_min, abs=0.1)
    assert sum(inputs) / num_requests == pytest.approx(mean_input, rel=0.001)
    assert sum(outputs) / num_requests == pytest.approx(mean_output, rel=0.003)
