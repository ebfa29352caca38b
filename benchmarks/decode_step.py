"""Time of one decode step of the CPU executor against the machine's physical limit.

The limit is the slower of reading all weights and KV once at the measured rate of this machine's memory, and doing
all multiply-adds at the measured rate of its registers. Run: `python benchmarks/decode_step.py`.
"""

from __future__ import annotations

import random

from cpu_bench import BLOCK_SIZE, Limits, load, median_and_best, parse, timed

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu import CpuExecutor

BATCH_SIZES = (1, 8, 32)
CONTEXT = range(320, 448)
"""Tokens before the one that is decoded; sequences of a batch differ."""
BLOCKS_PER_SEQUENCE = CONTEXT.stop // BLOCK_SIZE


def main() -> None:
    """Print the table."""
    options = parse(__doc__ or "")
    num_blocks = max(BATCH_SIZES) * BLOCKS_PER_SEQUENCE
    executors, limits = load(options, num_blocks), Limits()
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    times_s: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name, executor in executors.items():
            limits.measure(executor.context)
            for size in BATCH_SIZES:
                batch = decode_batch(size, blocks)
                executor.run(batch)
                steps = times_s.setdefault((name, size), [])
                steps += [timed(lambda run=executor.run, batch=batch: run(batch)) for _ in range(3)]
    first = next(iter(executors.values()))
    print(f"{first.isa}, {first.context.num_threads} threads; memory {limits.read_gb_per_s:.1f} GB/s,", end=" ")
    print(f"arithmetic {limits.gflops:.0f} GFLOP/s")
    print("| weights | batch | median ms | best ms | limit ms | share of the limit, best |\n|---|---|---|---|---|---|")
    for (name, size), values in times_s.items():
        median_s, best_s = median_and_best(values)
        limit_s = step_limit_s(executors[name], decode_batch(size, blocks), limits)
        print(f"| {name} | {size} | {median_s * 1e3:.1f} | {best_s * 1e3:.1f} | {limit_s * 1e3:.1f} |", end=" ")
        print(f"{limit_s / best_s:.0%} |")


def decode_batch(size: int, blocks: list[int]) -> list[SequenceSlice]:
    """`size` sequences at different positions over blocks of their own."""
    tables = [blocks[i * BLOCKS_PER_SEQUENCE :][:BLOCKS_PER_SEQUENCE] for i in range(size)]
    return [SequenceSlice([i + 5], CONTEXT[i * 37 % len(CONTEXT)], table, True) for i, table in enumerate(tables)]


def step_limit_s(executor: CpuExecutor, batch: list[SequenceSlice], limits: Limits) -> float:
    """Seconds that no implementation of this step on this machine can beat."""
    keys = sum(piece.start + 1 for piece in batch)
    num_bytes = executor.weight_bytes + keys * executor.kv_spec.bytes_per_token
    attention = 4 * keys * executor.num_attention_values
    return limits.seconds(num_bytes, 2 * len(batch) * executor.num_weights + attention)


if __name__ == "__main__":
    main()
