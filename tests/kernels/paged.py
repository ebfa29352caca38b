"""Random paged KV caches for the attention tests: shuffled blocks, strided layers, rubbish where nothing is."""

from __future__ import annotations

import torch


def make_layer(context_lens, kv_heads, head_dim, *, dtype, block_size):
    """(KV layer as a strided view, int32 block tables, int32 context lengths)."""
    torch.manual_seed(sum(context_lens) + head_dim)
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 2
    cache = torch.randn(num_blocks, 2, 2, block_size, kv_heads, head_dim, dtype=dtype)
    order = iter(torch.randperm(num_blocks).tolist())
    tables = torch.zeros(len(needed), max([*needed, 1]), dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    for row, length in enumerate(context_lens):  # behind the end lies what must not be read
        if length % block_size:
            cache[tables[row, needed[row] - 1], :, :, length % block_size :] = 1e4
    return cache[:, 1], tables, torch.tensor(context_lens, dtype=torch.int32)
