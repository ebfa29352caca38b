"""The CUDA executor: transformers weights, our Triton kernels, CUDA graphs for decode steps.

Models like Llama run in a fused decoder, and their decode steps as graphs; others keep their transformers modules and
get our attention. Under Triton's interpreter the same code serves on a CPU, slowly: executor `triton-interpreter`.
Never sees a sequence, a queue or a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from pdserve.engine.executors.base import KvCacheSpec, SequenceSlice
from pdserve.engine.executors.cuda.batch import (
    Staging,
    StepLayout,
    StepTensors,
    decodes_first,
    layout_of,
    warm_up_layouts,
)
from pdserve.engine.executors.cuda.device import Device
from pdserve.engine.executors.cuda.graphs import MAX_WORKSPACE_BYTES, DecodeGraphs, plan_sizes
from pdserve.engine.executors.cuda.kernels import KernelSet
from pdserve.engine.executors.cuda.memory import ModelSize, reserved_bytes
from pdserve.engine.executors.cuda.model import FusedDecoder, OptionsProbe, StockDecoder, why_not_fused
from pdserve.engine.executors.model_support import check_supported, longest_context
from pdserve.engine.executors.stock.attention_route import connect
from pdserve.engine.executors.stock.checkpoint import first_line, load_model
from pdserve.errors import ModelError
from pdserve.kernels.splits import workspace_bytes
from pdserve.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The largest step that the engine will ask for."""

    max_decode_seqs: int
    """Sequences of a decode step; 0: this worker does not decode, no graph is captured."""
    max_batched_tokens: int


class CudaExecutor:
    """An `Executor` on Triton kernels; see `Executor` for the guarantees.

    Args:
        model: a transformers causal model loaded with `attn_implementation=ATTENTION_NAME`, in eval mode, on the
            device. It is taken apart.
        device: where everything lies.
        kernels: to call.
        kv_dtype: of the KV cache.
        block_size: tokens in a block.
        max_model_len: context length, tokens.
        bounds: of the steps to come.
        name: cuda or triton-interpreter.
    """

    is_deterministic = False

    def __init__(
        self,
        model: Any,
        device: Device,
        kernels: KernelSet,
        *,
        kv_dtype: torch.dtype,
        block_size: int,
        max_model_len: int,
        bounds: StepBounds,
        name: str = "cuda",
    ) -> None:
        config = model.config.get_text_config()
        self.name, self.device = name, device.device
        self.vocab_size, self.max_model_len = int(config.vocab_size), max_model_len
        num_layers = int(config.num_hidden_layers)
        probe = _probe(model)
        num_kv_heads, head_dim = probe.uniform_shape(num_layers)
        self.kv_spec = KvCacheSpec(num_layers, block_size, num_kv_heads, head_dim, kv_dtype)
        self._device, self._staging, self._bounds = device, Staging(device), bounds
        self._size = ModelSize.of(config, head_dim, model.dtype.itemsize)
        self._decoder = _make_decoder(model, kernels, max_model_len, probe)
        self._kv_cache: Tensor | None = None
        self._graphs = self._capture([])

    @classmethod
    def load(
        cls,
        model_path: Path,
        device: Device,
        kernels: KernelSet,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        max_model_len: int | None,
        bounds: StepBounds,
        name: str = "cuda",
    ) -> CudaExecutor:
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
        model = load_model(model_path, dtype).to(device.device)
        return cls(
            model,
            device,
            kernels,
            kv_dtype=kv_dtype,
            block_size=block_size,
            max_model_len=length,
            bounds=bounds,
            name=name,
        )

    @property
    def reserved_bytes(self) -> int:
        """Device memory that steps and graphs will take beside the weights and the KV cache; a host has enough."""
        if self.device.type == "cpu":
            return 0
        return reserved_bytes(
            self._size,
            max_decode_seqs=self._bounds.max_decode_seqs,
            max_batched_tokens=self._bounds.max_batched_tokens,
            max_model_len=self.max_model_len,
        )

    @property
    def is_fused(self) -> bool:
        """Whether the fused decoder runs this model."""
        return self._decoder.is_fused

    @property
    def num_graphs(self) -> int:
        """Decode steps that were captured."""
        return self._graphs.num_graphs

    @property
    def kv_cache(self) -> Tensor:
        """The tensor `[num_blocks, *kv_spec.block_shape]` that `allocate_kv_cache` made."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        return self._kv_cache

    def allocate_kv_cache(self, num_blocks: int) -> Tensor:
        """Allocate the zeroed KV cache, compile all kernels, and capture the decode steps over it."""
        shape = (num_blocks, *self.kv_spec.block_shape)
        self._kv_cache = torch.zeros(shape, dtype=self.kv_spec.dtype, device=self.device)
        with torch.no_grad():
            for layout in warm_up_layouts(self.max_model_len, self.kv_spec.block_size):
                self._forward(self._staging.upload(layout, [], self.kv_spec.block_size), layout)
        self._device.synchronize()
        if self._decoder.is_fused:
            self._graphs = self._capture(
                plan_sizes(self._bounds.max_decode_seqs, self.max_model_len, self._workspace_bytes, MAX_WORKSPACE_BYTES)
            )
        return self._kv_cache

    @torch.no_grad()
    def run(self, batch: list[SequenceSlice]) -> Tensor:
        """Run one step; returns fp32 logits `[sum of num_logits, vocab_size]`."""
        order = decodes_first(batch)
        ordered = [batch[index] for index in order]
        layout = layout_of(ordered, self.kv_spec.block_size)
        logits = self._replay(ordered, layout)
        if logits is None:
            step = self._staging.upload(layout, ordered, self.kv_spec.block_size)
            logits = _in_given_order(self._forward(step, layout), order, batch)
        self._device.synchronize()
        return logits

    def _replay(self, batch: list[SequenceSlice], layout: StepLayout) -> Tensor | None:
        """The logits by a graph, or None: no graph holds this step."""
        if layout.num_prefills or layout.num_logits < layout.num_decodes:
            return None
        size = self._graphs.find(layout.num_decodes, layout.max_decode_context)
        if size is None:
            return None
        return self._graphs.replay(size, batch)[: layout.num_logits].clone()

    def _forward(self, step: StepTensors, layout: StepLayout) -> Tensor:
        return self._decoder.forward(step, layout, self.kv_cache)

    def _workspace_bytes(self, num_seqs: int, max_context: int) -> int:
        return workspace_bytes(num_seqs, self._size.num_heads, self._size.head_dim, max_context)

    def _capture(self, sizes: list[Any]) -> DecodeGraphs:
        before = self._device.free_bytes()
        forward: Callable[[StepTensors, StepLayout], Tensor] = self._forward
        with torch.no_grad():
            graphs = DecodeGraphs(
                self._device,
                forward,
                sizes,
                block_size=self.kv_spec.block_size,
                vocab_size=self.vocab_size,
            )
        if sizes:
            taken = (before - self._device.free_bytes()) / 2**20
            logger.info("%d decode graphs captured, %.0f MiB", graphs.num_graphs, taken)
        return graphs


def _in_given_order(logits: Tensor, order: list[int], batch: list[SequenceSlice]) -> Tensor:
    """Sort the rows of `logits`, which are in the order of the step, into the order of the caller's batch."""
    if order == sorted(order):
        return logits
    owners = [index for index in order for _ in range(batch[index].num_logits)]
    rows = sorted(range(len(owners)), key=owners.__getitem__)
    return logits[torch.tensor(rows, device=logits.device, dtype=torch.long)]


def _make_decoder(
    model: Any, kernels: KernelSet, max_model_len: int, probe: OptionsProbe
) -> FusedDecoder | StockDecoder:
    obstacle = why_not_fused(model.config.get_text_config())
    if obstacle is None:
        return FusedDecoder(model, kernels, max_model_len, probe.options)
    logger.warning("decode steps of this model are not fused and run without CUDA graphs, because %s", obstacle)
    return StockDecoder(model, kernels)


def _probe(model: Any) -> OptionsProbe:
    """One token through the model, to learn what really reaches the attention."""
    probe = OptionsProbe()
    connect(model, probe)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, position_ids=token, use_cache=False)
    return probe
