"""What the two CPU benchmarks share: a model of SmolLM2-135M's shape, executors, the machine's limits, medians.

Weights are random: time does not depend on them. Rounds are interleaved, so that a busy moment of the machine hits
every variant alike; the table shows medians, and shares of the limit by the best.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from benchmarks.report import parser, warn_when_busy
from safetensors.torch import save_file

from pdserve.engine.executors.cpu.executor import CpuExecutor
from pdserve.engine.executors.cpu.weights import map_memory

SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
}
VARIANTS = {
    "fp32": {"dtype": torch.float32, "kv_dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "kv_dtype": torch.bfloat16, "quantization": "int8"},
}
BLOCK_SIZE = 16


@dataclass
class Limits:
    """Best rates seen so far in this run."""

    read_gb_per_s: float = 0.0
    gflops: dict[int, float] = field(default_factory=dict)
    """Rate by the type in which weights are packed: pairs are multiplied twice as fast."""
    _memory: torch.Tensor = field(default_factory=lambda: map_memory(512 << 20).fill_(1))

    def measure(self, executor: CpuExecutor) -> None:
        """Read half a gigabyte in huge pages; multiply and add on registers, as this executor does."""
        context, packed_type = executor.context, executor.packed_type
        rate = context.read_gb_per_s(self._memory.data_ptr(), self._memory.numel() // 4)
        self.read_gb_per_s = max(self.read_gb_per_s, rate)
        self.gflops[packed_type] = max(self.gflops.get(packed_type, 0.0), context.fma_gflops(5_000_000, packed_type))

    def seconds(self, executor: CpuExecutor, num_bytes: float, flops: float) -> float:
        """What the slower of memory and arithmetic needs, each at its best rate."""
        return max(num_bytes / self.read_gb_per_s, flops / self.gflops[executor.packed_type]) * 1e-9

    def describe_arithmetic(self, executors: dict[str, CpuExecutor]) -> str:
        """The rate of each executor's products."""
        rates = [f"{name} {self.gflops[executor.packed_type]:.0f}" for name, executor in executors.items()]
        return f"arithmetic {', '.join(rates)} GFLOP/s"


def parse(name: str, description: str, argv: list[str] | None) -> argparse.Namespace:
    """The options that both benchmarks understand."""
    commands = parser(name, description)
    commands.add_argument("--model", type=Path, help="a model folder; default: random weights of SmolLM2-135M's shape")
    commands.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated: fp32, bf16, int8")
    commands.add_argument("--threads", type=int, help="default: all processors")
    commands.add_argument("--rounds", type=int, default=9, help="measurements of each figure")
    options = commands.parse_args(argv)
    warn_when_busy()
    return options


def load(options: argparse.Namespace, num_blocks: int) -> dict[str, CpuExecutor]:
    """One executor per variant, with its KV cache."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or _random_model(Path(temporary))
        executors = {
            name: CpuExecutor.load(folder, block_size=BLOCK_SIZE, threads=options.threads, **VARIANTS[name])
            for name in options.variants.split(",")
        }
    for executor in executors.values():
        executor.allocate_kv_cache(num_blocks)
    return executors


def timed(action: Callable[[], object]) -> float:
    """Seconds of wall time that the action took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _random_model(folder: Path) -> Path:
    shape, generator = SMOLLM2_135M, torch.Generator().manual_seed(0)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = hidden, hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    sizes = {"model.embed_tokens.weight": (shape["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        rows = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)}
        sizes |= {f"{prefix}self_attn.{name}_proj.weight": size for name, size in rows.items()}
        rows = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        sizes |= {f"{prefix}mlp.{name}_proj.weight": size for name, size in rows.items()}
        sizes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    tensors = {name: torch.randn(size, generator=generator) * 0.05 for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
