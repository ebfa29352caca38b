"""One step as the CUDA executor lays it out: sequences that decode first, all numbers in one piece of memory.

One piece means one copy to the device a step. A graph's step has a fixed layout in the same memory; rows without a
sequence have no context and write nothing. Never touches weights.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cuda.device import Device

_ALIGNMENT = 16
"""Bytes; kernels are told that their pointers have it."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The numbers of a step: views of one buffer, on the host or the device."""

    token_ids: Tensor
    """The scheduled tokens, int64 `[num_tokens]`."""
    positions: Tensor
    """Where each token stands in its sequence, int64 `[num_tokens]`."""
    slot_mapping: Tensor
    """Where each token's KV goes, int64 `[num_tokens]`; -1: nothing is written."""
    logit_rows: Tensor
    """Rows of the batch whose logits are wanted, int64 `[num_logits]`."""
    query_starts: Tensor
    """int32 `[num_prefills + 1]`: rows of each sequence that does not decode, counted from the first of them."""
    context_lens: Tensor
    """Tokens of each sequence once the step is done, int32 `[num_seqs]`; 0 in rows without a sequence."""
    block_tables: Tensor
    """Block ids of each sequence, int32 `[num_seqs, table_width]`."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sizes of a step, and where each tensor lies in the buffer."""

    num_decodes: int
    """Sequences with one token; they come first."""
    num_prefills: int
    num_tokens: int
    num_logits: int
    table_width: int
    """Blocks of the longest context; a multiple of 4, so that rows keep their alignment."""
    max_decode_context: int
    """Bounds the contexts of the sequences that decode."""
    max_prefill_queries: int

    def _shapes(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        num_seqs = self.num_decodes + self.num_prefills
        return [
            (torch.int64, (self.num_tokens,)),
            (torch.int64, (self.num_tokens,)),
            (torch.int64, (self.num_tokens,)),
            (torch.int64, (self.num_logits,)),
            (torch.int32, (self.num_prefills + 1,)),
            (torch.int32, (num_seqs,)),
            (torch.int32, (num_seqs, self.table_width)),
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer that a step of this layout takes."""
        return sum(_aligned(dtype.itemsize * int(np.prod(shape))) for dtype, shape in self._shapes())

    def views(self, buffer: Tensor) -> StepTensors:
        """The tensors in a uint8 buffer."""
        found, start = [], 0
        for dtype, shape in self._shapes():
            num_bytes = dtype.itemsize * int(np.prod(shape))
            found.append(buffer[start : start + num_bytes].view(dtype).view(shape))
            start += _aligned(num_bytes)
        assert len(found) == len(fields(StepTensors))
        return StepTensors(*found)


class Staging:
    """The buffer on both sides. It grows to the largest step; graphs need it never to move: reserve first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = device.pinned(0)
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device.device)

    def reserve(self, num_bytes: int) -> None:
        """Make room; tensors handed out before keep the old memory."""
        if num_bytes > len(self._host):
            self._host = self._device.pinned(num_bytes)
            self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.device)

    def on_device(self, layout: StepLayout) -> StepTensors:
        """The device's tensors of a layout."""
        assert layout.num_bytes <= len(self._host), f"{layout} needs {layout.num_bytes} bytes of {len(self._host)}"
        return layout.views(self._on_device)

    def upload(self, layout: StepLayout, batch: list[SequenceSlice], block_size: int) -> StepTensors:
        """Fill the host's side and send it on its way. The step before must be done.

        Args:
            batch: sequences that decode first; may be fewer than the layout has room for.
        """
        self.reserve(layout.num_bytes)
        _fill(layout.views(self._host), layout, batch, block_size)
        self._on_device[: layout.num_bytes].copy_(self._host[: layout.num_bytes], non_blocking=True)
        return layout.views(self._on_device)


def warm_up_layouts(max_model_len: int, block_size: int) -> list[StepLayout]:
    """Steps without sequences that between them call every kernel in every variant that it is compiled in."""
    width = table_width(max_model_len, block_size)
    return [
        StepLayout(
            num_decodes=1,
            num_prefills=1,
            num_tokens=3,
            num_logits=2,
            table_width=width,
            max_decode_context=context,
            max_prefill_queries=2,
        )
        for context in sorted({1, max_model_len})  # a single split of the context, and several
    ]


def decodes_first(batch: list[SequenceSlice]) -> list[int]:
    """The order of a step: indices of the slices with one token, then of the others."""
    return sorted(range(len(batch)), key=lambda index: len(batch[index].token_ids) > 1)


def layout_of(batch: list[SequenceSlice], block_size: int) -> StepLayout:
    """The exact layout of a batch in the order of `decodes_first`."""
    num_decodes = sum(len(piece.token_ids) == 1 for piece in batch)
    ends = [piece.start + len(piece.token_ids) for piece in batch]
    return StepLayout(
        num_decodes=num_decodes,
        num_prefills=len(batch) - num_decodes,
        num_tokens=sum(len(piece.token_ids) for piece in batch),
        num_logits=sum(piece.num_logits for piece in batch),
        table_width=table_width(max(ends), block_size),
        max_decode_context=max(ends[:num_decodes], default=0),
        max_prefill_queries=max((len(piece.token_ids) for piece in batch[num_decodes:]), default=0),
    )


def table_width(context_len: int, block_size: int) -> int:
    """Columns of a block table for contexts up to `context_len`."""
    return -(-context_len // (4 * block_size)) * 4


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _fill(host: StepTensors, layout: StepLayout, batch: list[SequenceSlice], block_size: int) -> None:
    """Write a batch into the host's tensors; what it leaves free becomes rows without a context."""
    token_ids, positions, slots = (t.numpy() for t in (host.token_ids, host.positions, host.slot_mapping))
    tables, lens = host.block_tables.numpy(), host.context_lens.numpy()
    starts, logit_rows = host.query_starts.numpy(), host.logit_rows.numpy()
    lens[:], slots[:], token_ids[:], positions[:], starts[:], tables[:] = 0, -1, 0, 0, 0, 0
    row, num_kept = 0, 0
    for index, piece in enumerate(batch):
        num_tokens = len(piece.token_ids)
        end_row, end = row + num_tokens, piece.start + num_tokens
        num_blocks = -(-end // block_size)
        assert len(piece.block_table) >= num_blocks, f"{len(piece.block_table)} blocks, {num_blocks} needed"
        token_ids[row:end_row] = piece.token_ids
        lens[index] = end
        tables[index, :num_blocks] = np.frombuffer(array("i", piece.block_table[:num_blocks]), dtype=np.int32)
        place = np.arange(piece.start, end)
        positions[row:end_row] = place
        slots[row:end_row] = tables[index, place // block_size].astype(np.int64) * block_size + place % block_size
        if index >= layout.num_decodes:
            starts[index - layout.num_decodes + 1] = end_row - layout.num_decodes
        num_kept_before, num_kept = num_kept, num_kept + piece.num_logits
        logit_rows[num_kept_before:num_kept] = np.arange(end_row - piece.num_logits, end_row)
        row = end_row
    logit_rows[num_kept:] = 0
