"""Paged prefill attention: time and share of the matrix product's rate, on a GPU."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Measure, main, num_bytes, random_tensor
from benchmarks.kernels.paged_kv import paged_kv

from pdserve.kernels.paged_prefill_attention import paged_prefill_attention
from pdserve.kernels.reference import paged_attention as reference_attention

SHAPES = [
    (4, 2048, 2048, 32, 8, 128),
    (1, 512, 8192, 32, 8, 128),
    (4, 2048, 2048, 32, 8, 64),
    (2, 2048, 2048, 16, 8, 256),
]
"""Sequences, queries of each, context, query heads, KV heads, head dimension."""
TINY_SHAPES = [(2, 20, 50, 4, 2, 32)]


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """Whole prompts, and a late chunk of a long one."""
    found = []
    for num_seqs, queries, context, heads, kv_heads, head_dim in TINY_SHAPES if is_tiny else SHAPES:
        layer, tables, lens = paged_kv(num_seqs, context, kv_heads, head_dim, device, dtype)
        query = random_tensor(num_seqs * queries, heads, head_dim, device=device, dtype=dtype)
        starts = torch.arange(0, (num_seqs + 1) * queries, queries, dtype=torch.int32, device=device)
        arguments = (query, layer, starts, lens, tables)
        named = {"max_query_len": queries, "scaling": head_dim**-0.5}
        seen = num_seqs * sum(range(context - queries + 1, context + 1))
        found.append(
            Measure(
                f"paged_prefill_attention {num_seqs} x {queries} of {context}, {heads}/{kv_heads} heads of {head_dim}",
                lambda a=arguments, n=named: paged_prefill_attention(*a, **n),
                lambda a=arguments, n=named: reference_attention.paged_prefill_attention(*a, **n),
                num_bytes(layer) + 2 * num_bytes(query),
                4 * seen * heads * head_dim,
            )
        )
    return found


if __name__ == "__main__":
    main(measures)
