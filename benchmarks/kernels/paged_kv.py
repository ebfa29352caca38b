"""Random paged KV caches for the attention benchmarks, block-major as in a worker."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import random_tensor
from torch import Tensor

BLOCK_SIZE = 16
_NUM_LAYERS = 2


def paged_kv(
    num_seqs: int, context_len: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(KV layer as a strided view, shuffled int32 block tables, int32 context lengths)."""
    blocks_each = -(-context_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_each
    cache = torch.empty(num_blocks, _NUM_LAYERS, 2, BLOCK_SIZE, kv_heads, head_dim, dtype=dtype, device=device)
    layer = cache[:, 1]
    layer.copy_(random_tensor(*layer.shape, device=device, dtype=dtype))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks))
    tables = order.view(num_seqs, blocks_each).int().to(device)
    lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
    return layer, tables, lens
