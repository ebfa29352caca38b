"""Eager torch twins of the attention kernels: the slow, obvious truth that every other kernel is tested against.

A *packed batch* lays the scheduled tokens of all its sequences end to end, without padding. Keys and values
live in blocks; one layer of the KV cache is a strided view `[num_blocks, 2, block_size, num_kv_heads, head_dim]`
of the block-major tensor. This module never sees a model, a scheduler or a sequence.

How attention is computed here: the queries of each sequence are cut into tiles; tiles of one shape are
grouped, their blocks gathered, and each group is one dense masked attention. Decoding sequences are tiles
of one query, so that a whole decode batch is a few groups and no loop runs over tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TILE_QUERIES = 256
"""Bounds the score matrix of a long prompt chunk."""

MAX_GROUP_SLOTS = 16_384
"""KV slots gathered at once: bounds the copies of a large decode batch."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A group of equally long runs of queries, each with the blocks that it can see."""

    token_index: Tensor
    """`[num_runs, num_queries]`: rows of the packed batch."""
    block_ids: Tensor
    """`[num_runs, num_blocks]`, padded with block 0."""
    mask: Tensor
    """`[num_runs, 1, num_queries, num_blocks * block_size]`: True where a query sees a slot."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Geometry of one packed batch: built once a step, shared by all layers."""

    query_starts: Tensor
    """int32 `[num_seqs + 1]`: sequence i's tokens are rows [query_starts[i], query_starts[i + 1])."""
    context_lens: Tensor
    """int32 `[num_seqs]`: tokens in the KV cache once this batch is written, its own included."""
    block_tables: Tensor
    """int32 `[num_seqs, max_num_blocks]`, padded with 0."""
    slot_mapping: Tensor
    """int64 `[num_tokens]`: block_id * block_size + offset, where each token's KV is written."""
    positions: Tensor
    """int64 `[num_tokens]`: each token's position in its sequence."""
    block_size: int
    max_query_len: int
    max_context_len: int
    tiles: dict[int | None, list[Tile]] = field(default_factory=dict, compare=False, repr=False)
    """Filled by `paged_attention`, per sliding window; a GPU kernel has no use for it."""

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on another device, not planned yet."""
        return replace(
            self,
            query_starts=self.query_starts.to(device),
            context_lens=self.context_lens.to(device),
            block_tables=self.block_tables.to(device),
            slot_mapping=self.slot_mapping.to(device),
            positions=self.positions.to(device),
            tiles={},
        )


def pack(query_lens: list[int], starts: list[int], block_tables: list[list[int]], block_size: int) -> PackedBatch:
    """Lay out a batch, whose tensors are made on the CPU.

    Args:
        query_lens: scheduled tokens of each sequence, >= 1.
        starts: position of each sequence's first scheduled token.
        block_tables: blocks of each sequence; cover its positions up to start + query_len.
        block_size: tokens in a block.
    """
    context_lens = [start + length for start, length in zip(starts, query_lens, strict=True)]
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    tables = torch.zeros(len(starts), max(num_blocks), dtype=torch.int32)
    for row, (table, needed) in enumerate(zip(block_tables, num_blocks, strict=True)):
        assert len(table) >= needed, f"sequence {row} has {len(table)} blocks and needs {needed}"
        tables[row, :needed] = torch.tensor(table[:needed], dtype=torch.int32)
    lengths = torch.tensor(query_lens)
    query_starts = torch.zeros(len(starts) + 1, dtype=torch.int32)
    query_starts[1:] = lengths.cumsum(0)
    sequence_of = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    offset_in_sequence = torch.arange(len(sequence_of)) - query_starts[:-1].long()[sequence_of]
    positions = torch.tensor(starts)[sequence_of] + offset_in_sequence
    slots = tables[sequence_of, positions // block_size].long() * block_size + positions % block_size
    return PackedBatch(
        query_starts=query_starts,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots,
        positions=positions,
        block_size=block_size,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of a packed batch into their slots, in the cache's dtype.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, after RoPE.
        value: `[num_tokens, num_kv_heads, head_dim]`.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        slot_mapping: int64 `[num_tokens]`.
    """
    block_size = kv_layer.shape[2]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_layer[block_ids, 0, offsets] = key.to(kv_layer.dtype)
    kv_layer[block_ids, 1, offsets] = value.to(kv_layer.dtype)


def paged_attention(
    query: Tensor,
    kv_layer: Tensor,
    batch: PackedBatch,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of a packed batch over the paged KV cache, which holds the batch's own KV already.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; num_heads is a multiple of num_kv_heads.
        kv_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, any strides.
        batch: the geometry of the batch.
        scaling: factor on the scores.
        sliding_window: a query sees its own and the `sliding_window - 1` tokens before; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.

    Returns:
        `[num_tokens, num_heads, head_dim]` in the query's dtype.
    """
    if sliding_window not in batch.tiles:
        batch.tiles[sliding_window] = list(_plan(batch, sliding_window))
    output = torch.empty_like(query)
    for tile in batch.tiles[sliding_window]:
        output[tile.token_index] = _attend(query[tile.token_index], kv_layer, tile, scaling, softcap)
    return output


def _attend(query: Tensor, kv_layer: Tensor, tile: Tile, scaling: float, softcap: float | None) -> Tensor:
    """Dense attention of one tile: query and result `[num_runs, num_queries, num_heads, head_dim]`."""
    num_runs, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    key, value = (
        kv_layer[tile.block_ids, part].flatten(1, 2).transpose(1, 2).to(query.dtype) for part in (0, 1)
    )  # [num_runs, num_kv_heads, num_slots, head_dim]
    # The query heads of one KV head become more queries of it, so that no key is repeated.
    folded = query.view(num_runs, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_runs, num_kv_heads, group * num_queries, head_dim)
    mask = tile.mask if group == 1 or num_queries == 1 else tile.mask.repeat(1, 1, group, 1)
    if softcap is None:
        mask = mask.expand(num_runs, 1, folded.shape[2], mask.shape[3])
        mixed = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = (folded @ key.transpose(2, 3)).float() * scaling
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
        mixed = scores.softmax(-1).to(value.dtype) @ value
    return mixed.view(num_runs, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive queries of one sequence and the blocks they see."""

    row: int
    """First row in the packed batch."""
    sequence: int
    position: int
    """The first query's position in its sequence."""
    num_queries: int
    first_block: int
    num_blocks: int


def _plan(batch: PackedBatch, sliding_window: int | None) -> Iterator[Tile]:
    """Group runs of equal length and similar context into tiles."""
    groups: dict[tuple[int, int], list[_Run]] = defaultdict(list)
    for run in _runs(batch, sliding_window):
        groups[run.num_queries, run.num_blocks.bit_length()].append(run)
    for runs in groups.values():
        max_blocks = max(run.num_blocks for run in runs)
        num_together = max(1, MAX_GROUP_SLOTS // (max_blocks * batch.block_size))
        for begin in range(0, len(runs), num_together):
            yield _tile(batch, runs[begin : begin + num_together], sliding_window)


def _runs(batch: PackedBatch, sliding_window: int | None) -> Iterator[_Run]:
    query_starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for sequence, context_len in enumerate(context_lens):
        row, end_row = query_starts[sequence], query_starts[sequence + 1]
        while row < end_row:
            num_queries = min(MAX_TILE_QUERIES, end_row - row)
            position = context_len - (end_row - row)
            first_slot = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            first_block = first_slot // batch.block_size
            end_block = -(-(position + num_queries) // batch.block_size)
            yield _Run(row, sequence, position, num_queries, first_block, end_block - first_block)
            row += num_queries


def _tile(batch: PackedBatch, runs: list[_Run], sliding_window: int | None) -> Tile:
    device = batch.block_tables.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    num_blocks = max(run.num_blocks for run in runs)
    first_block = column([run.first_block for run in runs])
    block_index = first_block + torch.arange(num_blocks, device=device)  # [num_runs, num_blocks]
    is_real = torch.arange(num_blocks, device=device) < column([run.num_blocks for run in runs])
    safe_index = torch.where(is_real, block_index, 0)
    tables = batch.block_tables[column([run.sequence for run in runs]), safe_index].long()
    queries = torch.arange(runs[0].num_queries, device=device)
    query_positions = (column([run.position for run in runs]) + queries)[:, None, :, None]
    slots = torch.arange(num_blocks * batch.block_size, device=device)
    slot_positions = (first_block * batch.block_size + slots)[:, None, None, :]
    mask = slot_positions <= query_positions
    if sliding_window is not None:
        mask = mask & (slot_positions > query_positions - sliding_window)
    return Tile(column([run.row for run in runs]) + queries, torch.where(is_real, tables, 0), mask)
