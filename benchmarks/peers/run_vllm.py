"""vLLM as an engine of `benchmarks.peers`: steps of its engine, in its own environment.

`…/vllm/bin/python benchmarks/peers/run_vllm.py FOLDER PRECISION`. A step is all that vLLM does for one: schedule, run,
sample. Its prefix cache is on, so that a sequence's context is computed once and not once per measurement; prompts
whose prefill is measured are different from their first token on.
"""

from __future__ import annotations

import os
import sys
import time

from protocol import prompt_of, serve

MAX_BATCH, MAX_MODEL_LEN = 32, 4096
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_FIRST_PREFILL = 100_000
"""Prompts below are contexts of decode steps."""


class VllmSteps:
    """`protocol.Steps` with vLLM's engine, which runs in this process."""

    def __init__(self, folder: str, precision: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # noqa: PLC0415  reads the environment

        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=folder,
            dtype=DTYPES[precision],
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_BATCH,
            max_num_batched_tokens=MAX_MODEL_LEN,
            disable_log_stats=True,
        ).llm_engine
        self._num_requests = 0
        self._num_prefills = 0
        self.versions = {"vllm": vllm.__version__}

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each decode step, as `protocol.Steps.decode` defines them."""
        for index in range(batch):
            self._add(prompt_of(index, context), steps + batch + 8)
        while len(self._step()[1]) < batch:  # until all prompts are computed
            pass
        self._step()
        seconds = [self._step()[0] for _ in range(steps)]
        self._drop_all()
        return seconds

    def prefill(self, tokens: int) -> list[float]:
        """Seconds of one prompt, as `protocol.Steps.prefill` defines them."""
        self._num_prefills += 1
        self._add(prompt_of(_FIRST_PREFILL + self._num_prefills, tokens), 1)
        seconds = 0.0
        while self._engine.has_unfinished_requests():
            seconds += self._step()[0]
        return [seconds]

    def greedy(self, tokens: list[int], num: int) -> list[int]:
        """The most likely next tokens, as `protocol.Steps.greedy` defines them."""
        self._add(tokens, num)
        found: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._step()[1]:
                found = list(output.outputs[0].token_ids)
        return found

    def _add(self, tokens: list[int], max_tokens: int) -> None:
        self._num_requests += 1
        sampling = self._sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        self._engine.add_request(str(self._num_requests), {"prompt_token_ids": tokens}, sampling)

    def _step(self) -> tuple[float, list]:  # type: ignore[type-arg]
        start_s = time.perf_counter()
        outputs = self._engine.step()
        return time.perf_counter() - start_s, outputs

    def _drop_all(self) -> None:
        self._engine.abort_request([str(number + 1) for number in range(self._num_requests)])
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    serve(VllmSteps, *sys.argv[1:])
