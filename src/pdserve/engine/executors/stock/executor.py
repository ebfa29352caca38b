"""The transformers executor: stock model code over packed batches and our paged KV cache.

It serves the most models, and other executors are compared with it. `AutoModelForCausalLM` brings every decoder that
uses the attention interface; `attention_route.py` brings its attention to our blocks. Models whose KV does not fit the
layout are refused at load, by name. Never sees a sequence, a queue or a clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from pdserve.engine.executors.base import KvCacheSpec, SequenceSlice
from pdserve.engine.executors.model_support import check_supported, longest_context
from pdserve.engine.executors.stock.attention_route import KvContext, ProbeContext, connect
from pdserve.engine.executors.stock.checkpoint import first_line, load_model
from pdserve.errors import ModelError
from pdserve.kernels.reference.packed_attention import PackedBatch, pack


class TransformersExecutor:
    """An `Executor` around a transformers model; see `Executor` for the guarantees.

    Args:
        model: a causal model loaded with `attn_implementation=ATTENTION_NAME`, in eval mode, on its device.
        kv_dtype: dtype of the KV cache.
        block_size: tokens in a block.
        max_model_len: context length, tokens.
    """

    name = "transformers"
    is_deterministic = False
    reserved_bytes = 0

    def __init__(self, model: Any, *, kv_dtype: torch.dtype, block_size: int, max_model_len: int) -> None:
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = max_model_len
        self._model = model
        self.device = torch.device(model.device)
        num_kv_heads, head_dim = _probe(model, int(config.num_hidden_layers))
        self.kv_spec = KvCacheSpec(int(config.num_hidden_layers), block_size, num_kv_heads, head_dim, kv_dtype)
        self._context = KvContext()
        connect(model, self._context)

    @classmethod
    def load(
        cls,
        model_path: Path,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        max_model_len: int | None,
    ) -> TransformersExecutor:
        """Load a local Hugging Face folder.

        Raises:
            ModelError: the folder cannot be read, or the model cannot be served.
            SettingError: `max_model_len` is beyond the model's.
        """
        try:
            config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        except Exception as error:  # whatever a configuration makes of transformers' own code
            raise ModelError(f"{model_path} is not a readable model folder: {first_line(error)}") from error
        check_supported(config)
        length = longest_context(config, max_model_len)
        # The folder is read again, rather than `config` passed on: loading writes into the configuration it is given.
        model = load_model(model_path, dtype).to(device)
        return cls(model, kv_dtype=kv_dtype, block_size=block_size, max_model_len=length)

    @property
    def kv_cache(self) -> Tensor:
        """The tensor `[num_blocks, *kv_spec.block_shape]` that `allocate_kv_cache` made."""
        assert self._context.kv_cache is not None, "allocate_kv_cache comes first"
        return self._context.kv_cache

    def allocate_kv_cache(self, num_blocks: int) -> Tensor:
        """Allocate the zeroed KV cache on the model's device."""
        shape = (num_blocks, *self.kv_spec.block_shape)
        self._context.kv_cache = torch.zeros(shape, dtype=self.kv_spec.dtype, device=self.device)
        return self._context.kv_cache

    @torch.no_grad()
    def run(self, batch: list[SequenceSlice]) -> Tensor:
        """One forward pass; fp32 logits `[sum of num_logits, vocab_size]`."""
        packed = _pack(batch, self.kv_spec.block_size, self.device)
        token_ids = torch.tensor([token for piece in batch for token in piece.token_ids], device=self.device)
        ends = [int(end) for end in packed.query_starts[1:].tolist()]
        kept = [row for end, piece in zip(ends, batch, strict=True) for row in range(end - piece.num_logits, end)]
        self._context.batch = packed
        try:
            output = self._model(
                input_ids=token_ids[None],
                position_ids=packed.positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(kept, dtype=torch.long, device=self.device),
            )
        finally:
            self._context.batch = None
        logits: Tensor = output.logits[0].float()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return logits


def _probe(model: Any, num_layers: int) -> tuple[int, int]:
    """One token through the model, to learn (num_kv_heads, head_dim) from what really reaches the attention."""
    probe = ProbeContext()
    connect(model, probe)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, position_ids=token, use_cache=False)
    return probe.uniform_shape(num_layers)


def _pack(batch: list[SequenceSlice], block_size: int, device: torch.device) -> PackedBatch:
    packed = pack(
        [len(piece.token_ids) for piece in batch],
        [piece.start for piece in batch],
        [piece.block_table for piece in batch],
        block_size,
    )
    return packed if device.type == "cpu" else packed.to(device)
