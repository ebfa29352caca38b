"""The route from a transformers attention module into our paged KV cache. No state of its own.

transformers calls a registered attention function with the module, its queries, keys and values. Each
attention module of an executor's model carries that executor's *paged context* as an attribute, so that
any number of models live in one process and nothing is global but the function's name.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from pdserve.errors import ModelError
from pdserve.kernels.reference.packed_attention import PackedBatch, paged_attention, write_kv

ATTENTION_NAME = "pdserve_paged"
_CONTEXT = "paged_context"
_KNOWN_TENSORS = frozenset({"position_ids"})
"""Keyword tensors that change nothing for causal attention over positions."""


class PagedContext(Protocol):
    """What an attention module is connected to."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Query `[num_tokens, num_heads, head_dim]`, key and value alike; returns the mixed values."""
        ...


def connect(model: torch.nn.Module, context: PagedContext) -> None:
    """Give every module that belongs to a layer this context (again: another one)."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _CONTEXT, context)


def _route(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered function: `[1, heads, num_tokens, head_dim]` in, `[1, num_tokens, heads, head_dim]` out."""
    context: PagedContext = getattr(module, _CONTEXT)
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    mixed = context.attend(layer, query, key, value, options)
    return mixed[None], None


AttentionInterface.register(ATTENTION_NAME, _route)


class KvContext:
    """Writes the keys and values of the current batch into the KV cache and attends over it."""

    def __init__(self) -> None:
        self.kv_cache: Tensor | None = None
        self.batch: PackedBatch | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Write and attend in one layer of the running batch."""
        assert self.kv_cache is not None, "allocate_kv_cache comes before run"
        assert self.batch is not None, "no batch is running"
        kv_layer = self.kv_cache[:, layer]
        write_kv(key, value, kv_layer, self.batch.slot_mapping)
        return paged_attention(
            query.contiguous(),
            kv_layer,
            self.batch,
            scaling=options.get("scaling") or query.shape[-1] ** -0.5,
            sliding_window=options.get("sliding_window"),
            softcap=options.get("softcap"),
        )


class ProbeContext:
    """Sees one forward pass at load time and learns the KV geometry, or why the model cannot be served."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        """(num_kv_heads, head_dim) of each layer, by its number."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Record one layer; returns values of the right shape."""
        if key.shape != value.shape:
            raise ModelError(f"layer {layer} has keys {tuple(key.shape)} but values {tuple(value.shape)}: not served")
        if layer in self.shapes:
            raise ModelError(f"layer {layer} attends twice in one forward pass: not served")
        odd = [name for name, option in options.items() if isinstance(option, Tensor) and name not in _KNOWN_TENSORS]
        if odd or options.get("is_causal") is False:
            raise ModelError(f"attention with {odd or 'is_causal=False'} is not served (only causal, softcap, window)")
        self.shapes[layer] = (key.shape[1], key.shape[2])
        return torch.zeros_like(query)

    def uniform_shape(self, num_layers: int) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer.

        Raises:
            ModelError: a layer does not attend through the interface, or layers differ.
        """
        missing = [layer for layer in range(num_layers) if layer not in self.shapes]
        if missing:
            raise ModelError(f"layers {missing} have no attention with a KV cache: hybrid models are not served")
        different = sorted(set(self.shapes.values()))
        if len(different) > 1:
            raise ModelError(f"layers differ in (num_kv_heads, head_dim): {different}; only uniform ones are served")
        return different[0]
