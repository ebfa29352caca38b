"""How fast KV blocks travel, and what a client notices of it.

First the transfer threads of a decode worker read the blocks of prompts out of another process, with and without
verifying digests, beside one plain NIXL READ and one memcpy of the same bytes; all ways take turns. Then a whole
service answers 2,000-token prompts: the gap between token 0 and token 1, in decode steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from benchmarks.hand_off_source import NONCE, SIGNATURE
from benchmarks.report import Row, at_least, at_most, median_row, parser, publish, warn_when_busy
from benchmarks.service_load import Load

from pdserve.engine.executors.cpu.weights import map_memory
from pdserve.local.service import PrivateService
from pdserve.transfer.base import Transport
from pdserve.transfer.descriptor import decode_descriptor
from pdserve.transfer.nixl.agent import NativeList, NixlAgent
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.pulls.pull import PullOutcome, PullRequest
from pdserve.transfer.pulls.puller import Puller
from pdserve.transfer.tcp.transport import TcpTransport

BLOCK_BYTES = 30 * 2 * 16 * 3 * 64 * 4
"""Bytes of a block of 16 tokens of SmolLM2-135M in fp32."""
RAW, MEMCPY = "raw NIXL", "memcpy"
_GROUPS = ((MEMCPY, RAW, "Puller nixl", "Puller nixl, digests"), ("Puller tcp", "Puller tcp, digests"))
"""What takes turns: threads that answer over tcp work on for a while, which is no part of NIXL's transfers."""
_TIMEOUT_S = 30.0
_MANY = 3
"""Small transfers get at most so many times more rounds than large ones."""


class Reader:
    """Reads the same blocks in every way; a context manager that owns the other process."""

    def __init__(self, num_blocks: int, block_bytes: int, max_read_bytes: int | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.hand_off_source", str(num_blocks), str(block_bytes)]
        self._source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._source.stdout is not None
        offer = json.loads(self._source.stdout.readline())
        self._digests = [bytes.fromhex(digest) for digest in offer["digests"]]
        self._descriptors = {name: decode_descriptor(bytes.fromhex(d)) for name, d in offer["descriptors"].items()}
        self._blocks = map_memory(num_blocks * block_bytes).view(num_blocks, block_bytes).fill_(1)
        self._copied = self._blocks.clone()
        transports: dict[str, Transport] = {"nixl": NixlTransport(), "tcp": TcpTransport()}
        for transport in transports.values():
            transport.register(self._blocks, "reader", "1", SIGNATURE)
        self._puller = Puller(transports, self._blocks, max_read_bytes=max_read_bytes)
        self._puller.start()
        self._raw, self._lists = _raw_agent(self._blocks, offer["raw"])
        self.ways: dict[str, Callable[[list[int]], float]] = {
            MEMCPY: self._copy,
            RAW: self._read_raw,
            "Puller nixl": lambda ids: self._pull("nixl", ids, is_verified=False),
            "Puller nixl, digests": lambda ids: self._pull("nixl", ids, is_verified=True),
            "Puller tcp": lambda ids: self._pull("tcp", ids, is_verified=False),
            "Puller tcp, digests": lambda ids: self._pull("tcp", ids, is_verified=True),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._puller.close()
        self._raw.destroy()
        assert self._source.stdin is not None
        self._source.stdin.close()
        self._source.wait(10)

    def _copy(self, ids: list[int]) -> float:
        source, destination = self._copied.numpy(), self._blocks.numpy()
        start_s = time.perf_counter()
        for block_id in ids:
            np.copyto(destination[block_id], source[block_id])
        return time.perf_counter() - start_s

    def _read_raw(self, ids: list[int]) -> float:
        start_s = time.perf_counter()
        read, has_ended = self._raw.post_read(self._lists[0], ids, self._lists[1], ids)
        failure = ""
        while not has_ended:
            has_ended, failure = self._raw.has_ended(read)
        duration_s = time.perf_counter() - start_s
        assert not failure, failure
        self._raw.release(read)
        return duration_s

    def _pull(self, backend: str, ids: list[int], *, is_verified: bool) -> float:
        outcomes: list[tuple[float, PullOutcome]] = []
        is_over = threading.Event()

        def on_end(outcome: PullOutcome) -> None:
            outcomes.append((time.perf_counter(), outcome))
            is_over.set()

        digests = [self._digests[block_id] for block_id in ids] if is_verified else []
        deadline_s = time.monotonic() + _TIMEOUT_S
        start_s = time.perf_counter()
        self._puller.submit(PullRequest(self._descriptors[backend], NONCE, ids, ids, digests, deadline_s, on_end))
        is_over.wait(2 * _TIMEOUT_S)
        end_s, outcome = outcomes[0]
        assert outcome.ok, outcome
        return end_s - start_s


def measure_transfers(sizes: list[int], block_bytes: int, num_rounds: int, max_read_bytes: int | None) -> list[Row]:
    """Rates of every way, in turns of random order, and ours as a share of raw NIXL in the same round.

    Args:
        sizes: numbers of blocks read at once.
    """
    rates: dict[tuple[int, str], list[float]] = {}
    num_blocks, chooser = 2 * max(sizes), random.Random(0)
    block_ids = itertools.cycle(range(num_blocks))
    with Reader(num_blocks, block_bytes, max_read_bytes) as reader:
        for read in reader.ways.values():
            read(list(range(num_blocks)))  # connections, page tables, both processes' memory
        for size, group in itertools.product(sizes, _GROUPS):
            # Small ones differ more from each other, and cost little.
            for _ in range(max(num_rounds, round(num_rounds * min(_MANY, max(sizes) / size)))):
                ways = list(group)
                chooser.shuffle(ways)
                for way in ways:
                    # Each reads other blocks: none finds them in a cache because another one read them before.
                    ids = [next(block_ids) for _ in range(size)]
                    rates.setdefault((size, way), []).append(size * block_bytes / reader.ways[way](ids) / 1e9)
    return [row for size in sizes for row in _transfer_rows(size, block_bytes, rates)]


def _transfer_rows(size: int, block_bytes: int, rates: dict[tuple[int, str], list[float]]) -> list[Row]:
    case = f"{size} blocks, {size * block_bytes / 1e6:.0f} MB"
    ways = {way: values for (count, way), values in rates.items() if count == size}
    rows = [
        median_row(way if way in (RAW, MEMCPY) else "pdserve", "any", _case(case, way), "rate", "GB/s", values)
        for way, values in ways.items()
    ]
    for way in ("Puller nixl", "Puller nixl, digests"):
        shares = [ours / raw for ours, raw in zip(ways[way], ways[RAW], strict=True)]
        rows.append(median_row("pdserve", "any", _case(case, way), "share of raw NIXL", "", shares, at_least(0.8)))
    return rows


def _case(case: str, way: str) -> str:
    return case if way in (RAW, MEMCPY) else f"{case}, {way}"


def measure_gap(model: str, prompt_tokens: int, num_prompts: int) -> list[Row]:
    """A prompt at a time through a whole service: token 1 minus token 0, beyond one decode step, in decode steps."""
    with PrivateService(model) as service:
        records = asyncio.run(_answers(service.url, prompt_tokens, num_prompts))
    steps_s = [statistics.median(record.itl_s[1:]) for record in records]
    gaps = [record.handoff_gap_s / step_s - 1 for record, step_s in zip(records, steps_s, strict=True)]
    case = f"{prompt_tokens}-token prompt, alone"
    return [
        median_row("pdserve", "fp32", case, "decode step", "ms", [step_s * 1e3 for step_s in steps_s]),
        median_row("pdserve", "fp32", case, "hand-off gap", "ms", [r.handoff_gap_s * 1e3 for r in records]),
        median_row("pdserve", "fp32", case, "hand-off gap beyond a step", "steps", gaps, at_most(1.5)),
    ]


async def _answers(url: str, prompt_tokens: int, num_prompts: int) -> list[Any]:
    async with Load(url) as load:
        await load.answer(prompt_tokens, 32)  # a first request warms everything up
        return [await load.answer(prompt_tokens, 32) for _ in range(num_prompts)]


def _raw_agent(blocks: torch.Tensor, offer: dict[str, Any]) -> tuple[NixlAgent, tuple[NativeList, NativeList]]:
    """NIXL as it is: one READ for everything, and a loop that asks whether it has ended."""
    agent = NixlAgent(f"raw-reader:{secrets.token_hex(4)}", progress_thread=False)
    num_blocks, block_bytes = blocks.shape
    agent.register([(blocks.data_ptr(), blocks.numel(), 0)], "DRAM")
    agent.add_peer(bytes.fromhex(offer["metadata"]), offer["name"])
    mine = [(blocks.data_ptr() + index * block_bytes, block_bytes, 0) for index in range(num_blocks)]
    theirs = [(offer["address"] + index * block_bytes, block_bytes, 0) for index in range(num_blocks)]
    return agent, (agent.prepare("", mine, "DRAM"), agent.prepare(offer["name"], theirs, "DRAM"))


def main(argv: list[str] | None = None) -> None:
    """Measure transfers and the gap in a service's answers, or one of the two; print the figures."""
    options = _parse(argv)
    warn_when_busy()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = [int(size) for size in options.blocks.split(",")]
    rows = []
    if options.only != "gap":
        rows = measure_transfers(sizes, options.block_bytes, options.rounds, options.max_read_bytes)
    if options.only != "transfer":
        rows += measure_gap(options.model, options.prompt_tokens, options.prompts)
    publish(rows, _headline(rows), options.json)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    commands = parser("hand_off", __doc__ or "")
    commands.add_argument("--only", choices=("transfer", "gap"), help="one half of it")
    commands.add_argument("--blocks", default="13,32,125", help="blocks read at once (default: 13,32,125)")
    commands.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    commands.add_argument("--max-read-bytes", type=int, help="of one READ (default: a worker's)")
    commands.add_argument("--rounds", type=int, default=27)
    commands.add_argument("--model", default="demo")
    commands.add_argument("--prompt-tokens", type=int, default=2000)
    commands.add_argument("--prompts", type=int, default=5)
    return commands.parse_args(argv)


def _headline(rows: list[Row]) -> str:
    shares = [row for row in rows if row.metric == "share of raw NIXL" and row.case.endswith("digests")]
    gaps = [row for row in rows if row.unit == "steps"]
    parts = [f"verified blocks travel at {shares[-1].value:.2f} of raw NIXL's rate"] if shares else []
    parts += [f"hand-off gap {gaps[0].value:.2f} steps beyond one"] if gaps else []
    return ", ".join(parts)


if __name__ == "__main__":
    main()
