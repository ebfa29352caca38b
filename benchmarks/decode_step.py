"""Time of one decode step of the CPU executor against the machine's physical limit.

The limit is the slower of reading all weights and KV once at the measured rate of this machine's memory, and doing
all multiply-adds at the measured rate of its registers. Run: `python -m benchmarks.decode_step`.
"""

from __future__ import annotations

import random

from benchmarks.cpu_bench import BLOCK_SIZE, Limits, load, parse, timed
from benchmarks.report import Row, at_least, median_row, publish

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor

BATCH_SIZES = (1, 8, 32)
CONTEXT = range(320, 448)
"""Tokens before the one that is decoded; sequences of a batch differ."""
BLOCKS_PER_SEQUENCE = CONTEXT.stop // BLOCK_SIZE
TARGETS = {1: at_least(0.85), 8: at_least(0.65), 32: at_least(0.5)}
"""The least share of the physical limit that fp32 has to reach, by batch size."""


def main(argv: list[str] | None = None) -> None:
    """Measure all variants in turns, and print the figures."""
    options = parse("decode_step", __doc__ or "", argv)
    num_blocks = max(BATCH_SIZES) * BLOCKS_PER_SEQUENCE
    executors, limits = load(options, num_blocks), Limits()
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    times_s: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name, executor in executors.items():
            limits.measure(executor)
            for size in BATCH_SIZES:
                batch = decode_batch(size, blocks)
                executor.run(batch)
                steps = times_s.setdefault((name, size), [])
                steps += [timed(lambda run=executor.run, batch=batch: run(batch)) for _ in range(3)]
    first = next(iter(executors.values()))
    print(f"{first.isa}, {first.context.num_threads} threads; memory {limits.read_gb_per_s:.1f} GB/s,", end=" ")
    print(f"{limits.describe_arithmetic(executors)}; shares of the limit are of the best step")
    rows = [
        row
        for (name, size), values in times_s.items()
        for row in _rows(name, size, values, step_limit_s(executors[name], decode_batch(size, blocks), limits))
    ]
    shares = {
        row.case: row.value for row in rows if row.metric == "share of the limit" and row.precision == rows[0].precision
    }
    publish(
        rows,
        f"{rows[0].precision}: " + ", ".join(f"{case} at {share:.0%}" for case, share in shares.items()),
        options.json,
    )


def _rows(name: str, size: int, times_s: list[float], limit_s: float) -> list[Row]:
    case, target = f"batch {size}", TARGETS[size] if name == "fp32" else None
    return [
        median_row("pdserve", name, case, "step", "ms", [step_s * 1e3 for step_s in times_s]),
        median_row("pdserve", name, case, "limit", "ms", [limit_s * 1e3]),
        median_row("pdserve", name, case, "share of the limit", "", [limit_s / min(times_s)], target),
    ]


def decode_batch(size: int, blocks: list[int]) -> list[SequenceSlice]:
    """`size` sequences at different positions over blocks of their own."""
    tables = [blocks[i * BLOCKS_PER_SEQUENCE :][:BLOCKS_PER_SEQUENCE] for i in range(size)]
    return [SequenceSlice([i + 5], CONTEXT[i * 37 % len(CONTEXT)], table, True) for i, table in enumerate(tables)]


def step_limit_s(executor: CpuExecutor, batch: list[SequenceSlice], limits: Limits) -> float:
    """Seconds that no implementation of this step on this machine can beat."""
    keys = sum(piece.start + 1 for piece in batch)
    num_bytes = executor.weight_bytes + keys * executor.kv_spec.bytes_per_token
    attention = 4 * keys * executor.num_attention_values
    return limits.seconds(executor, num_bytes, 2 * len(batch) * executor.num_weights + attention)


if __name__ == "__main__":
    main()
