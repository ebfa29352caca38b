"""Our CPU executor as an engine of `benchmarks.peers`: `python run_ours.py FOLDER PRECISION THREADS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from protocol import prompt_of, serve

import pdserve
from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor

BLOCK_SIZE, CHUNK_TOKENS, NUM_BLOCKS = 16, 512, 1024
PRECISIONS = {
    "fp32": {"dtype": torch.float32, "kv_dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
    "q8_0": {"dtype": torch.float32, "kv_dtype": torch.bfloat16, "quantization": "int8"},
}


class OurSteps:
    """`protocol.Steps` with the CPU executor of this package."""

    def __init__(self, folder: str, precision: str, threads: str) -> None:
        options = PRECISIONS[precision]
        self._executor = CpuExecutor.load(Path(folder), block_size=BLOCK_SIZE, threads=int(threads), **options)  # type: ignore[arg-type]
        self._executor.allocate_kv_cache(NUM_BLOCKS)
        self._num_prompts = 0
        self.versions = {"pdserve": pdserve.__version__}

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each decode step; the KV is whatever lies there, because time does not depend on it."""
        per_sequence = (context + steps) // BLOCK_SIZE + 1
        assert batch * per_sequence <= NUM_BLOCKS, (batch, per_sequence)
        tables = [list(range(index, batch * per_sequence, batch)) for index in range(batch)]
        seconds = []
        for step in range(-1, steps):  # the first is not counted
            slices = [SequenceSlice([9 + i], context + max(0, step), table, True) for i, table in enumerate(tables)]
            start_s = time.perf_counter()
            self._executor.run(slices)
            seconds.append(time.perf_counter() - start_s)
        return seconds[1:]

    def prefill(self, tokens: int) -> list[float]:
        """Seconds of one prompt, as `protocol.Steps.prefill` defines them."""
        self._num_prompts += 1
        prompt = prompt_of(self._num_prompts, tokens)
        start_s = time.perf_counter()
        self._compute(prompt)
        return [time.perf_counter() - start_s]

    def greedy(self, tokens: list[int], num: int) -> list[int]:
        """The most likely next tokens, as `protocol.Steps.greedy` defines them."""
        table = list(range(-(-(len(tokens) + num) // BLOCK_SIZE)))
        found = [int(self._compute(tokens).argmax())]
        while len(found) < num:
            slices = [SequenceSlice([found[-1]], len(tokens) + len(found) - 1, table, True)]
            found.append(int(self._executor.run(slices)[0].argmax()))
        return found

    def _compute(self, prompt: list[int]) -> torch.Tensor:
        table = list(range(-(-len(prompt) // BLOCK_SIZE)))
        logits = torch.empty(0)
        for start in range(0, len(prompt), CHUNK_TOKENS):
            chunk = prompt[start : start + CHUNK_TOKENS]
            logits = self._executor.run([SequenceSlice(chunk, start, table, start + len(chunk) == len(prompt))])
        return logits[-1]


if __name__ == "__main__":
    serve(OurSteps, *sys.argv[1:])
