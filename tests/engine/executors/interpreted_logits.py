"""In a process of its own: the triton-interpreter executor on mixed batches, against the stock model.

Arguments: model folder. Prints the largest relative error of the logits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.loader import load_executor


@torch.no_grad()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    executor = load_executor(folder, executor="triton-interpreter", block_size=4, max_model_len=64)
    assert (executor.name, executor.device.type) == ("triton-interpreter", "cpu")
    executor.allocate_kv_cache(32)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  after the loader has switched the interpreter on

    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    texts = [list(range(7, 47)), list(range(100, 109))]
    tables = [[3 * index % 32 for index in range(12)], [1, 4, 7]]
    computed, worst = [0, 0], 0.0
    for chunk in [[30, 8], [1, 1], [9, 0]]:
        batch, expected = [], []
        for index, num_tokens in enumerate(chunk):
            if num_tokens:
                end = computed[index] + num_tokens
                batch.append(SequenceSlice(texts[index][computed[index] : end], computed[index], tables[index], True))
                expected.append(stock(torch.tensor([texts[index][:end]])).logits[0, -1])
                computed[index] = end
        logits, truth = executor.run(batch), torch.stack(expected)
        worst = max(worst, float((logits - truth).abs().max() / truth.abs().max()))
    print(worst)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
