"""The CUDA executor in gpu_check: decode steps with and without graphs, and greedy tokens against transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.bench import largest_error, time_ms
from transformers import AutoConfig, AutoModelForCausalLM

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cuda.device import CudaDevice, Device, HostDevice
from pdserve.engine.executors.cuda.executor import CudaExecutor, StepBounds
from pdserve.engine.executors.cuda.kernels import triton_kernels
from pdserve.engine.executors.stock.attention_route import ATTENTION_NAME
from pdserve.models.tiny import make_model

BLOCK_SIZE = 16
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""Shape of Llama 3.2 1B; the weights are random, time does not depend on them."""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
_MAX_SEQS = 32


def decode_step_times(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[dict[str, Any]]:
    """Milliseconds of a decode step of a Llama 1B, launched one by one and as a graph, and how far logits differ."""
    config = AutoConfig.for_model("llama", **(TINY if is_tiny else LLAMA_1B))
    max_seqs, context = (2, 20) if is_tiny else (_MAX_SEQS, 1000)
    eager, graphed = (_random_model(config, device, dtype, max_decode_seqs=seqs) for seqs in (0, max_seqs))
    blocks_each = -(-(context + 1) // BLOCK_SIZE)
    for executor in (eager, graphed):
        executor.allocate_kv_cache(max_seqs * blocks_each)
        executor.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
    rows = []
    for num_seqs in [1, max_seqs] if is_tiny else [1, 8, max_seqs]:
        tables = [list(range(index * blocks_each, (index + 1) * blocks_each)) for index in range(num_seqs)]
        batch = [SequenceSlice([7], context, table, samples=True) for table in tables]
        error = largest_error(graphed.run(batch), eager.run(batch))
        times = (time_ms(lambda run=e.run, b=batch: run(b), device) for e in (eager, graphed))
        eager_ms, graph_ms = times
        rows.append(
            {"num_seqs": num_seqs, "context": context, "eager_ms": eager_ms, "graph_ms": graph_ms, "error": error}
        )
    return rows


def compare_greedy(device: torch.device, *, is_tiny: bool) -> tuple[int, int]:
    """How many answers of a small fp32 model equal those of transformers, and of how many."""
    num_prompts, num_tokens = (1, 3) if is_tiny else (8, 24)
    num_equal = 0
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "tiny", "llama", 1)
        executor = CudaExecutor.load(
            path,
            _device(device),
            triton_kernels(),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            bounds=StepBounds(max_decode_seqs=4, max_batched_tokens=512),
        )
        executor.allocate_kv_cache(64)
        stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        for index in range(num_prompts):
            prompt = [40 + (7 * index + 3 * place) % 200 for place in range(5 + 17 * index)]
            num_equal += _greedy(executor, prompt, num_tokens) == _stock_greedy(stock, prompt, num_tokens)
    return num_equal, num_prompts


def _greedy(executor: CudaExecutor, prompt: list[int], num_tokens: int) -> list[int]:
    table = list(range(-(-(len(prompt) + num_tokens) // BLOCK_SIZE)))
    logits = executor.run([SequenceSlice(prompt, 0, table, samples=True)])
    tokens = [int(logits[0].argmax())]
    while len(tokens) < num_tokens:
        position = len(prompt) + len(tokens) - 1
        logits = executor.run([SequenceSlice([tokens[-1]], position, table, samples=True)])
        tokens.append(int(logits[0].argmax()))
    return tokens


@torch.no_grad()
def _stock_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens], device=model.device)).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _random_model(config: Any, device: torch.device, dtype: torch.dtype, *, max_decode_seqs: int) -> CudaExecutor:
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return CudaExecutor(
        model.to(device).eval(),
        _device(device),
        triton_kernels(),
        kv_dtype=dtype,
        block_size=BLOCK_SIZE,
        max_model_len=int(config.max_position_embeddings),
        bounds=StepBounds(max_decode_seqs=max_decode_seqs, max_batched_tokens=512),
    )


def _device(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else HostDevice()
