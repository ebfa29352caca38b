"""How much device memory steps take beside weights and KV cache, so that the block pool leaves it free. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.engine.executors.base import MAX_SCORED_LOGITS_BYTES
from pdserve.engine.executors.cuda.graphs import MAX_WORKSPACE_BYTES
from pdserve.kernels.splits import workspace_bytes

_FIXED_BYTES = 256 << 20
"""Libraries' own workspaces, compiled kernels and the allocator's rounding."""
_NUM_HIDDEN_COPIES = 6
"""Hidden states alive at once: input, residual, normed, queries, their rotation, mixed values."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the size of intermediate results depends on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int
    """Bytes of one activation."""

    @classmethod
    def of(cls, config: Any, head_dim: int, itemsize: int) -> ModelSize:
        """Read the sizes from a transformers text configuration."""
        hidden_size = int(config.hidden_size)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
            num_heads=int(config.num_attention_heads),
            head_dim=head_dim,
            vocab_size=int(config.vocab_size),
            itemsize=itemsize,
        )


def reserved_bytes(size: ModelSize, *, max_decode_seqs: int, max_batched_tokens: int, max_model_len: int) -> int:
    """Intermediate results of the largest step, and what the graphs keep.

    Args:
        max_decode_seqs: 0: no graphs.
        max_batched_tokens: of a step.
        max_model_len: tokens.
    """
    hidden = max(size.hidden_size, size.num_heads * size.head_dim)
    per_token = (_NUM_HIDDEN_COPIES * hidden + 3 * size.intermediate_size) * size.itemsize
    # A row's logits: in the type of the weights, in float32, and the sampler's copies.
    per_row = size.vocab_size * (size.itemsize + 4 + 3 * 4)
    num_rows = max(max_decode_seqs, 1)
    attention = min(workspace_bytes(num_rows, size.num_heads, size.head_dim, max_model_len), 4 * MAX_WORKSPACE_BYTES)
    graphs = max_decode_seqs * (per_token + size.vocab_size * 4) + min(attention, MAX_WORKSPACE_BYTES)
    step = max(max_batched_tokens, num_rows) * per_token + num_rows * per_row + attention
    # Prompts that are scored: their logits in the type of the weights and in float32.
    scored = MAX_SCORED_LOGITS_BYTES * (size.itemsize + 4) // 4
    return _FIXED_BYTES + step + scored + (graphs if max_decode_seqs else 0)
