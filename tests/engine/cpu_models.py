"""Random models of odd shapes, their transformers twins, and batches over shuffled blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu.executor import CpuExecutor

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 2048,
}


def build(folder: Path, arch: str = "llama", seed: int = 0, **fields: Any) -> Path:
    """Save a random model whose biases and norms differ from their neutral values; returns the folder."""
    config = AutoConfig.for_model(arch, **{**BASE, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5 * 1.5)
    model.save_pretrained(folder)
    return folder


def stock(folder: Path) -> torch.nn.Module:
    """The unchanged transformers model in fp32: the independent truth."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def stock_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """`[len(token_ids), vocab_size]`."""
    return model(torch.tensor([token_ids])).logits[0]


def load(folder: Path, *, num_blocks: int = 256, **options: Any) -> CpuExecutor:
    """A CPU executor with its KV cache."""
    defaults = {"dtype": torch.float32, "kv_dtype": torch.float32, "block_size": 16, "threads": 2}
    executor = CpuExecutor.load(folder, **{**defaults, **options})
    executor.allocate_kv_cache(num_blocks)
    return executor


def tokens(count: int, seed: int = 0, vocab_size: int = BASE["vocab_size"]) -> list[int]:
    """Random token ids."""
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(count)]


class Feeder:
    """One sequence: hands out its next tokens as slices over blocks of its own."""

    def __init__(self, token_ids: list[int], block_table: list[int], start: int = 0) -> None:
        self.token_ids, self.block_table, self.position = token_ids, block_table, start

    def next(self, count: int) -> SequenceSlice:
        """The next `count` tokens; their last row samples."""
        start, self.position = self.position, self.position + count
        return SequenceSlice(self.token_ids[start : self.position], start, self.block_table, samples=True)


def run_in_chunks(executor: CpuExecutor, feeder: Feeder, chunks: list[int]) -> torch.Tensor:
    """Logits after each chunk, `[len(chunks), vocab_size]`."""
    return torch.cat([executor.run([feeder.next(count)]).clone() for count in chunks])


def shuffled_blocks(num_blocks: int, seed: int = 0) -> list[int]:
    """All block ids in random order."""
    return random.Random(seed).sample(range(num_blocks), num_blocks)
