"""How decode attention cuts a context into splits, and what their partial results take. Knows no kernel."""

from __future__ import annotations

SPLIT_TOKENS = 256
"""Enough programs for one long sequence to fill a GPU, and partial results of a few percent of the KV read."""


def num_splits(max_context_len: int) -> int:
    """The number of splits of a context of so many tokens; at least one."""
    return max(1, -(-max_context_len // SPLIT_TOKENS))


def workspace_bytes(num_seqs: int, num_heads: int, head_dim: int, max_context_len: int) -> int:
    """Bytes that the partial results of one call take; a single split has none."""
    count = num_splits(max_context_len)
    return 0 if count == 1 else num_seqs * num_heads * count * (head_dim + 2) * 4
