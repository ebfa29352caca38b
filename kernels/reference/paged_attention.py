"""Eager torch twins of the paged attention kernels: every score of a row at once, in float32, from gathered blocks.

Same names and signatures as the kernels. Slower and simpler than `reference.paged_attention`; a test holds the two
against each other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    max_context_len: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one query per sequence, as `pdserve.kernels.paged_decode_attention` says."""
    block_size = kv_layer.shape[2]
    tables = block_tables[:, : max(1, -(-max_context_len // block_size))].long()
    key, value = (kv_layer[tables, part].flatten(1, 2) for part in (0, 1))
    slot = torch.arange(key.shape[1], device=query.device)
    is_seen = slot < context_lens[:, None]
    if sliding_window is not None:
        is_seen = is_seen & (slot >= context_lens[:, None] - sliding_window)
    return _mix(query[:, None], key, value, is_seen[:, None, None, None], scaling, softcap)[:, 0]


def paged_prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    max_query_len: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of packed sequences, as `pdserve.kernels.paged_prefill_attention` says; one by one."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        assert end - first <= max_query_len, (first, end, max_query_len)
        table = block_tables[sequence, : -(-context_len // kv_layer.shape[2])].long()
        key, value = (kv_layer[table, part].flatten(0, 1)[None, :context_len] for part in (0, 1))
        slot = torch.arange(context_len, device=query.device)
        position = context_len - (end - first) + torch.arange(end - first, device=query.device)[:, None]
        is_seen = slot <= position
        if sliding_window is not None:
            is_seen = is_seen & (slot > position - sliding_window)
        output[first:end] = _mix(query[None, first:end], key, value, is_seen[None, None, None], scaling, softcap)[0]
    return output


def _mix(query: Tensor, key: Tensor, value: Tensor, is_seen: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Dense attention in float32.

    Args:
        query: `[num_seqs, num_queries, num_heads, head_dim]`.
        key: `[num_seqs, num_slots, num_kv_heads, head_dim]`; value the same.
        is_seen: broadcasts to `[num_seqs, num_kv_heads, group, num_queries, num_slots]`.
    """
    num_seqs, num_queries, num_heads, head_dim = query.shape
    grouped = query.float().view(num_seqs, num_queries, key.shape[2], num_heads // key.shape[2], head_dim)
    scores = torch.einsum("sqkgd,snkd->skgqn", grouped, key.float()) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # A row that sees nothing gets zeros.
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1).nan_to_num()
    mixed = torch.einsum("skgqn,snkd->sqkgd", weights, value.float())
    return mixed.reshape(query.shape).to(query.dtype)
