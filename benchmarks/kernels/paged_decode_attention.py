"""Paged decode attention: time, share of the copy bandwidth, and SDPA and FlexAttention beside it, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmarks.gpu.bench import Measure, largest_error, main, num_bytes, random_tensor, time_ms
from benchmarks.kernels.paged_kv import paged_kv
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from pdserve.kernels.paged_decode_attention import paged_decode_attention
from pdserve.kernels.reference import paged_attention as reference_attention

SHAPES = [(1, 8192, 32, 8, 128), (64, 4096, 32, 8, 128), (64, 1024, 32, 8, 64), (16, 4096, 16, 8, 256)]
"""Sequences, context, query heads, KV heads, head dimension."""
TINY_SHAPES = [(2, 300, 4, 2, 32)]


def measures(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> list[Measure]:
    """One long sequence, large batches, and the head dimensions that models have."""
    found = []
    for num_seqs, context, heads, kv_heads, head_dim in TINY_SHAPES if is_tiny else SHAPES:
        layer, tables, lens = paged_kv(num_seqs, context, kv_heads, head_dim, device, dtype)
        query = random_tensor(num_seqs, heads, head_dim, device=device, dtype=dtype)
        arguments = (query, layer, tables, lens)
        named = {"max_context_len": context, "scaling": head_dim**-0.5}
        found.append(
            Measure(
                f"paged_decode_attention {num_seqs} x {context}, {heads}/{kv_heads} heads of {head_dim}",
                lambda a=arguments, n=named: paged_decode_attention(*a, **n),
                lambda a=arguments, n=named: reference_attention.paged_decode_attention(*a, **n),
                num_bytes(layer) + 2 * num_bytes(query),
                4 * num_seqs * context * heads * head_dim,
            )
        )
    return found


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of one decode attention. The others read KV that lies in one piece, without blocks."""

    shape: str
    paged_ms: float
    sdpa_ms: float
    flex_ms: float
    error: float
    """Largest difference between ours and SDPA, relative to the largest value."""


def compare(device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Comparison:
    """Time ours, SDPA and FlexAttention on the same keys and values."""
    num_seqs, context, heads, kv_heads, head_dim = (TINY_SHAPES if is_tiny else SHAPES[1:])[0]
    layer, tables, lens = paged_kv(num_seqs, context, kv_heads, head_dim, device, dtype)
    query = random_tensor(num_seqs, heads, head_dim, device=device, dtype=dtype)
    key, value = (_in_one_piece(layer, tables, part, context) for part in (0, 1))
    one = query[:, :, None]
    # Not compiled it is for trying only, and so slow that nothing is measured.
    flex = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def paged() -> Tensor:
        return paged_decode_attention(query, layer, tables, lens, max_context_len=context, scaling=head_dim**-0.5)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(one, key, value, enable_gqa=True)

    return Comparison(
        shape=f"{num_seqs} x {context}, {heads}/{kv_heads} heads of {head_dim}, {dtype}",
        paged_ms=time_ms(paged, device),
        sdpa_ms=time_ms(sdpa, device),
        flex_ms=time_ms(lambda: flex(one, key, value, enable_gqa=True), device),
        error=largest_error(paged(), sdpa()[:, :, 0]),
    )


def _in_one_piece(layer: Tensor, tables: Tensor, part: int, context: int) -> Tensor:
    """Keys or values of all sequences, `[num_seqs, num_kv_heads, context, head_dim]`, without blocks."""
    gathered = layer[tables.long(), part].flatten(1, 2)[:, :context]
    return gathered.transpose(1, 2).contiguous()


if __name__ == "__main__":
    main(measures)
