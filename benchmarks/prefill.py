"""Prefill rate of the CPU executor against the machine's rate of multiply-adds.

One prompt, in chunks as a worker would compute it. Run: `python benchmarks/prefill.py`.
"""

from __future__ import annotations

from cpu_bench import BLOCK_SIZE, Limits, load, median_and_best, parse, timed

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu import CpuExecutor

PROMPT_TOKENS = (128, 512, 2048)
CHUNK_TOKENS = 512


def main() -> None:
    """Print the table."""
    options = parse(__doc__ or "")
    executors, limits = load(options, max(PROMPT_TOKENS) // BLOCK_SIZE), Limits()
    times_s: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name, executor in executors.items():
            limits.measure(executor.context)
            for count in PROMPT_TOKENS:
                elapsed = timed(lambda executor=executor, count=count: prefill(executor, count))
                times_s.setdefault((name, count), []).append(elapsed)
    first = next(iter(executors.values()))
    print(f"{first.isa}, {first.context.num_threads} threads; arithmetic {limits.gflops:.0f} GFLOP/s")
    print("| weights | prompt tokens | median tok/s | best tok/s | share of the limit, best |\n|---|---|---|---|---|")
    for (name, count), values in times_s.items():
        median_s, best_s = median_and_best(values)
        share = limits.seconds(0, prefill_flops(executors[name], count)) / best_s
        print(f"| {name} | {count} | {count / median_s:.0f} | {count / best_s:.0f} | {share:.0%} |")


def prefill(executor: CpuExecutor, count: int) -> None:
    """Compute a prompt's KV and the logits of its last token."""
    table = list(range(count // BLOCK_SIZE))
    for start in range(0, count, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, count - start)
        executor.run([SequenceSlice([7] * size, start, table, samples=start + size == count)])


def prefill_flops(executor: CpuExecutor, count: int) -> float:
    """All matrices but the head for each token, causal attention, the head once."""
    layers = executor.num_weights - executor.num_head_weights
    return 2 * count * layers + 2 * count * count * executor.num_attention_values + 2 * executor.num_head_weights


if __name__ == "__main__":
    main()
