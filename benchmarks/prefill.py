"""Prefill rate of the CPU executor against the machine's rate of multiply-adds.

One prompt, in chunks as a worker would compute it. Run: `python -m benchmarks.prefill`.
"""

from __future__ import annotations

from benchmarks.cpu_bench import BLOCK_SIZE, Limits, load, parse, timed
from benchmarks.report import Row, median_row, publish

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor

PROMPT_TOKENS = (128, 512, 2048)
CHUNK_TOKENS = 512


def main(argv: list[str] | None = None) -> None:
    """Measure all variants in turns, and print the figures."""
    options = parse("prefill", __doc__ or "", argv)
    executors, limits = load(options, max(PROMPT_TOKENS) // BLOCK_SIZE), Limits()
    times_s: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name, executor in executors.items():
            limits.measure(executor)
            for count in PROMPT_TOKENS:
                elapsed = timed(lambda executor=executor, count=count: prefill(executor, count))
                times_s.setdefault((name, count), []).append(elapsed)
    first = next(iter(executors.values()))
    print(f"{first.isa}, {first.context.num_threads} threads; {limits.describe_arithmetic(executors)}")
    rows = [
        row
        for (name, count), values in times_s.items()
        for row in _rows(name, count, values, prefill_limit_s(executors[name], count, limits))
    ]
    rates = {row.case: row.value for row in rows if row.metric == "rate" and row.precision == rows[0].precision}
    publish(
        rows,
        f"{rows[0].precision}: " + ", ".join(f"{case} {rate:.0f} tok/s" for case, rate in rates.items()),
        options.json,
    )


def _rows(name: str, count: int, times_s: list[float], limit_s: float) -> list[Row]:
    case = f"{count} tokens"
    return [
        median_row("pdserve", name, case, "rate", "tok/s", [count / seconds for seconds in times_s]),
        median_row("pdserve", name, case, "share of the limit", "", [limit_s / min(times_s)]),
    ]


def prefill(executor: CpuExecutor, count: int) -> None:
    """Compute a prompt's KV and the logits of its last token."""
    table = list(range(count // BLOCK_SIZE))
    for start in range(0, count, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, count - start)
        executor.run([SequenceSlice([7] * size, start, table, samples=start + size == count)])


def prefill_limit_s(executor: CpuExecutor, count: int, limits: Limits) -> float:
    """All matrices but the head for each token, causal attention, the head once.

    In the last layer only the last row of a prompt needs more than its keys and values.
    """
    rows = count * (executor.num_weights - executor.num_head_weights) - (count - 1) * executor.num_skipped_weights
    attention = 2 * count * count * executor.num_attention_values * (1 - 1 / executor.kv_spec.num_layers)
    return limits.seconds(executor, 0, 2 * rows + attention + 2 * executor.num_head_weights)


if __name__ == "__main__":
    main()
