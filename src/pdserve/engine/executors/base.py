"""The executor interface: one forward pass over a packed batch. Implementations lie beside this file.

An executor owns the model's weights and the KV cache tensor; it never sees a sequence, a queue or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

MAX_SCORED_LOGITS_BYTES = 128 << 20
"""Prompts whose log-probabilities are wanted are computed in chunks whose logits, in fp32, take no more in one step."""


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """Geometry of one KV block. One block is one contiguous piece of memory, layers inside it:

    `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` (2 = key, value).
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: `(num_layers, 2, block_size, num_kv_heads, head_dim)`."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.block_bytes // self.block_size


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """What one sequence contributes to a batch."""

    token_ids: list[int]
    """The scheduled tokens: a prompt chunk, or the one token to decode."""
    start: int
    """Position of the first of them; their KV is written at [start, start + len)."""
    block_table: list[int]
    """Covers at least [0, start + len)."""
    samples: bool
    """Whether the logits of the last token are wanted."""
    tag: Any = None
    """Opaque to real executors; the fake executor reads the sequence here."""
    num_scored: int = 0
    """The logits of so many last tokens are wanted, because the prompt's log-probabilities are."""

    @property
    def num_logits(self) -> int:
        """Last tokens whose logits are wanted."""
        return max(self.num_scored, int(self.samples))


class Executor(Protocol):
    """What the engine asks of a model that runs on one device.

    Guarantees: `run` writes the KV of every slice before it returns, and returns only when the device is
    done (the caller may offer the blocks to a peer at once). It raises on device errors, leaving other
    blocks untouched. It is called from one thread, and releases the GIL while it computes.
    """

    name: str
    """One of transformers, cpu, cuda, triton-interpreter and fake."""
    device: torch.device
    """Where the KV cache lies."""
    is_deterministic: bool
    """Whether a row's logits are bit-equal whatever shares the batch and however its prompt was cut into chunks."""
    vocab_size: int
    max_model_len: int
    kv_spec: KvCacheSpec

    @property
    def reserved_bytes(self) -> int:
        """Bytes of device memory that steps take and the KV cache must leave free; 0 where they are negligible."""
        ...

    @property
    def kv_cache(self) -> torch.Tensor:
        """The tensor `[num_blocks, *kv_spec.block_shape]` that `allocate_kv_cache` made."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> torch.Tensor:
        """Allocate (zeroed) and remember the KV cache; called once, before `run`."""
        ...

    def run(self, batch: list[SequenceSlice]) -> torch.Tensor:
        """Run one step of the model.

        Args:
            batch: slices with at least one token each; at most one per sequence.

        Returns:
            fp32 logits `[sum of the slices' num_logits, vocab_size]`, in the batch's order: without prompts that
            are scored, one row for each slice that samples.
        """
        ...
