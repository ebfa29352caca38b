"""The CPU executor: one call of our own kernels is a whole step of a Llama-like decoder. Never calls torch's kernels.

Results do not depend on what shares the batch: each row's logits are bit-equal however its prompt was cut into
chunks, whichever neighbours it had, prefill or decode, and whatever the number of threads.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.executors.base import KvCacheSpec, SequenceSlice
from pdserve.engine.executors.cpu import rope
from pdserve.engine.executors.cpu import shape as cpu_shape
from pdserve.engine.executors.cpu.layout import WeightLayout
from pdserve.engine.executors.cpu.packed_file import PackedMemory, WeightSharing, file_name, open_or_pack
from pdserve.engine.executors.cpu.processors import usable_processors
from pdserve.engine.executors.cpu.weights import Checkpoint, PackedModel, map_memory, own_memory, pack_model
from pdserve.errors import ModelError, SettingError
from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.log import get_logger
from pdserve.models.identity import model_fingerprint

logger = get_logger(__name__)


def cpu_executor_supports(config: dict[str, Any]) -> str | None:
    """Why the CPU executor cannot run a model with this config.json here, or None when it can."""
    return cpu_ops.why_unavailable() or cpu_shape.why_unsupported(config) or rope.why_unsupported(config)


class CpuExecutor:
    """An `Executor` on packed weights; see `Executor` for the guarantees.

    Args:
        packed: the model.
        shape: its geometry.
        context: threads and instruction set.
        kv_dtype: float32 or bfloat16.
        block_size: tokens in a block.
        max_model_len: context length, tokens; the rope tables cover it.
    """

    name = "cpu"
    device = torch.device("cpu")
    is_deterministic = True
    reserved_bytes = 0

    def __init__(
        self,
        packed: PackedModel,
        shape: cpu_shape.CpuShape,
        context: cpu_ops.CpuContext,
        *,
        kv_dtype: torch.dtype,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.vocab_size = shape.vocab_size
        self.max_model_len = max_model_len
        self.kv_spec = KvCacheSpec(shape.num_layers, block_size, shape.num_kv_heads, shape.head_dim, kv_dtype)
        self.weight_bytes = packed.num_bytes
        self.num_head_weights = shape.vocab_size * shape.hidden_size
        self.num_weights = shape.num_layers * shape.num_layer_weights + self.num_head_weights
        """Multiply-adds of one row through all matrices."""
        self.num_skipped_weights = shape.num_layer_weights - shape.num_qkv_rows * shape.hidden_size
        """Those of the last layer that a row needs only for its logits."""
        self.num_attention_values = shape.num_layers * shape.num_heads * shape.head_dim
        """Query values of one row over all layers."""
        self.context = context
        self._packed = packed
        self._kv_cache: Tensor | None = None

    @classmethod
    def load(
        cls,
        model_path: Path,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        max_model_len: int | None = None,
        quantization: str = "none",
        threads: int | None = None,
        sharing: WeightSharing | None = None,
    ) -> CpuExecutor:
        """Load a local Hugging Face folder with safetensors weights.

        Args:
            dtype: of the weights; activations and sums are fp32 in any case, but narrow weights are multiplied with
                activations rounded to bf16 where the processor has products of bf16 pairs (isa avx512_bf16).
            quantization: none | int8 (weights only, one scale per output row).
            threads: None takes the processors that this process may use, within its quota.
            sharing: whether packed weights lie in a file that other workers map too; None: not.

        Raises:
            ModelError: the kernels cannot run this model, or its folder cannot be read.
            SettingError: a dtype, quantization or context length that is not served.
        """
        config = _read_config(model_path)
        if (reason := cpu_executor_supports(config)) is not None:
            raise ModelError(f"the CPU executor cannot run {model_path}: {reason}; use executor transformers")
        shape = cpu_shape.read_shape(config)
        length = _context_length(shape.max_positions, max_model_len)
        num_threads = threads or usable_processors()
        context = cpu_ops.CpuContext(num_threads, os.environ.get("PDS_CPU_ISA", ""))
        layout = WeightLayout.of(_weight_dtype(dtype, quantization), context)
        pack = partial(
            pack_model,
            Checkpoint(model_path),
            shape,
            layout=layout,
            kv_dtype=_served_dtype("KV_DTYPE", kv_dtype),
            block_size=block_size,
            rope=rope.rope_tables(cpu_shape.with_defaults(config), shape.head_dim, length),
            num_threads=num_threads,
        )
        num_bytes = layout.packed_bytes(shape)
        packed = pack(memory=_memory(model_path, num_bytes, layout, sharing, lambda memory: pack(memory=memory)))
        return cls(packed, shape, context, kv_dtype=kv_dtype, block_size=block_size, max_model_len=length)

    @property
    def isa(self) -> str:
        """Instruction set in use: avx512_bf16, avx512, avx2 or portable."""
        return self.context.isa

    @property
    def packed_type(self) -> int:
        """How the weights are packed: cpu_ops.F32, BF16, I8, BF16_PAIRS or I8_PAIRS."""
        return int(self._packed.model.weight_type)

    @property
    def kv_cache(self) -> Tensor:
        """The tensor `[num_blocks, *kv_spec.block_shape]` that `allocate_kv_cache` made."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        return self._kv_cache

    def allocate_kv_cache(self, num_blocks: int) -> Tensor:
        """Allocate the zeroed KV cache, in huge pages where the system grants them."""
        memory = map_memory(num_blocks * self.kv_spec.block_bytes)
        self._kv_cache = memory.view(self.kv_spec.dtype).view(num_blocks, *self.kv_spec.block_shape)
        return self._kv_cache

    def run(self, batch: list[SequenceSlice]) -> Tensor:
        """Run one step; returns fp32 logits `[sum of num_logits, vocab_size]`.

        Raises:
            MemoryError: intermediate results do not fit; nothing was computed.
        """
        return self._step(_PackedBatch(batch))

    def logits_of_all_tokens(self, batch: list[SequenceSlice]) -> Tensor:
        """Like `run`, with logits for every token of every slice, `[num tokens, vocab_size]`: for measuring quality."""
        packed = _PackedBatch(batch)
        packed.logit_rows = array("i", range(len(packed.token_ids)))
        return self._step(packed)

    def _step(self, packed: _PackedBatch) -> Tensor:
        self._check(packed)
        logits = torch.empty(len(packed.logit_rows), self._packed.model.head.n)
        self.context.step(self._packed.model, packed.as_struct(self.kv_cache, logits))
        return logits[:, : self.vocab_size]

    def _check(self, packed: _PackedBatch) -> None:
        """The kernels read addresses: nothing out of range may reach them."""
        num_blocks = self.kv_cache.shape[0]
        assert min(packed.token_ids) >= 0, min(packed.token_ids)
        assert max(packed.token_ids) < self.vocab_size, (max(packed.token_ids), self.vocab_size)
        assert packed.max_end <= self.max_model_len, (packed.max_end, self.max_model_len)
        assert min(packed.block_tables) >= 0, min(packed.block_tables)
        assert max(packed.block_tables) < num_blocks, (max(packed.block_tables), num_blocks)
        for piece in packed.batch:
            end = piece.start + len(piece.token_ids)
            assert piece.token_ids, "a slice without tokens"
            assert len(piece.block_table) * self.kv_spec.block_size >= end, (len(piece.block_table), end)


class _PackedBatch:
    """A batch as int32 arrays that the kernels read in place."""

    def __init__(self, batch: list[SequenceSlice]) -> None:
        assert batch, "an empty batch"
        self.batch = batch
        self.token_ids, self.slices, self.block_tables = array("i"), array("i"), array("i")
        self.logit_rows = array("i")
        self.max_end = 0
        for piece in batch:
            num_rows = len(piece.token_ids)
            self.slices.extend((len(self.token_ids), num_rows, piece.start, len(self.block_tables)))
            self.token_ids.extend(piece.token_ids)
            self.block_tables.extend(piece.block_table)
            self.max_end = max(self.max_end, piece.start + num_rows)
            self.logit_rows.extend(range(len(self.token_ids) - piece.num_logits, len(self.token_ids)))

    def as_struct(self, kv_cache: Tensor, logits: Tensor) -> cpu_ops.Batch:
        """Addresses of this object's arrays and of the two tensors: keep all three alive."""
        return cpu_ops.Batch(
            num_rows=len(self.token_ids),
            num_slices=len(self.batch),
            num_logit_rows=len(self.logit_rows),
            token_ids=self.token_ids.buffer_info()[0],
            slices=self.slices.buffer_info()[0],
            block_tables=self.block_tables.buffer_info()[0],
            logit_rows=self.logit_rows.buffer_info()[0],
            kv_cache=kv_cache.data_ptr(),
            logits=logits.data_ptr(),
        )


def _memory(
    model_path: Path,
    num_bytes: int,
    layout: WeightLayout,
    sharing: WeightSharing | None,
    pack: Callable[[PackedMemory], object],
) -> PackedMemory:
    """Memory for the packed weights: a file's when they are to be shared and it can be had, else our own."""
    if sharing is None or not sharing.is_wanted(num_bytes):
        return own_memory(num_bytes)
    name = file_name(model_path, model_fingerprint(model_path), *layout.key)
    try:
        return open_or_pack(sharing.folder / name, num_bytes, pack)
    except OSError as error:
        logger.warning("packed weights are not shared: %s", error)
        return own_memory(num_bytes)


def _read_config(model_path: Path) -> dict[str, Any]:
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} is not a readable model folder: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{model_path}/config.json is no JSON object")
    return config


def _context_length(longest: int, wanted: int | None) -> int:
    if wanted is not None and wanted > longest:
        raise SettingError("MAX_MODEL_LEN", wanted, f"at most {longest}, the context length of the model")
    return wanted or longest


def _weight_dtype(dtype: torch.dtype, quantization: str) -> torch.dtype:
    if quantization not in ("none", "int8"):
        raise SettingError("QUANTIZATION", quantization, "none or int8 with the CPU executor")
    return torch.int8 if quantization == "int8" else _served_dtype("DTYPE", dtype)


def _served_dtype(setting: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.bfloat16):
        raise SettingError(setting, dtype, "float32 or bfloat16 with the CPU executor")
    return dtype
