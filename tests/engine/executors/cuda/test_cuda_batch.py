from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cuda.batch import (
    Staging,
    StepLayout,
    decodes_first,
    layout_of,
    table_width,
    warm_up_layouts,
)
from pdserve.engine.executors.cuda.device import HostDevice
from pdserve.kernels.reference.packed_attention import pack
from pdserve.kernels.splits import num_splits


@st.composite
def batches(draw):
    piece = st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans(), st.integers(0, 9))
    pieces = draw(st.lists(piece, min_size=1, max_size=7))
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    batch, next_block = [], 100
    for start, count, samples, num_scored in pieces:
        num_blocks = -(-(start + count) // block_size) + draw(st.integers(0, 2))
        blocks = list(range(next_block, next_block + num_blocks))
        batch.append(SequenceSlice(list(range(count)), start, blocks, samples, num_scored=min(num_scored, count)))
        next_block += num_blocks
    return batch, block_size


@settings(deadline=None, max_examples=60)
@given(batches())
def test_a_step_is_laid_out_as_the_reference_packs_it(case):
    batch, block_size = case
    batch = [batch[index] for index in decodes_first(batch)]
    layout = layout_of(batch, block_size)
    step = Staging(HostDevice()).upload(layout, batch, block_size)
    lens = [len(piece.token_ids) for piece in batch]
    packed = pack(lens, [p.start for p in batch], [p.block_table for p in batch], block_size)
    assert step.token_ids.tolist() == [token for piece in batch for token in piece.token_ids]
    assert torch.equal(step.positions, packed.positions)
    assert torch.equal(step.slot_mapping, packed.slot_mapping)
    assert torch.equal(step.context_lens, packed.context_lens)
    assert torch.equal(step.block_tables[:, : packed.block_tables.shape[1]], packed.block_tables)
    assert torch.equal(step.query_starts, packed.query_starts[layout.num_decodes :] - layout.num_decodes)
    ends = packed.query_starts[1:].tolist()
    wanted = [row for end, piece in zip(ends, batch, strict=True) for row in range(end - piece.num_logits, end)]
    assert step.logit_rows.tolist() == wanted
    assert layout.num_decodes == sum(length == 1 for length in lens)


def test_sequences_that_decode_come_first_and_keep_their_order():
    batch = [SequenceSlice([1] * length, 0, [0], True) for length in (3, 1, 2, 1)]
    assert decodes_first(batch) == [1, 3, 0, 2]


def test_rows_without_a_sequence_have_no_context_and_no_slot_and_nothing_of_the_step_before():
    layout = StepLayout(4, 0, 4, 4, table_width(64, 4), 64, 0)
    staging = Staging(HostDevice())
    full = [SequenceSlice([9], 30, list(range(1, 9)), True)] * 4
    staging.upload(layout, full, 4)
    step = staging.upload(layout, full[:1], 4)
    assert step.context_lens.tolist() == [31, 0, 0, 0]
    assert step.slot_mapping.tolist() == [8 * 4 + 2, -1, -1, -1]
    assert not step.block_tables[1:].any()
    assert not step.token_ids[1:].any()


def test_tensors_are_aligned_and_do_not_overlap():
    layout = StepLayout(3, 2, 17, 5, table_width(100, 16), 50, 9)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    step = layout.views(buffer)
    tensors = [getattr(step, name) for name in step.__dataclass_fields__]
    spans = sorted((t.data_ptr() - buffer.data_ptr(), t.numel() * t.element_size()) for t in tensors)
    assert all(start % 16 == 0 for start, _ in spans)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= layout.num_bytes


@pytest.mark.parametrize("context_len", [1, 64, 65, 4096])
def test_block_tables_keep_the_alignment_of_their_rows(context_len):
    width = table_width(context_len, 16)
    assert width % 4 == 0
    assert 16 * width >= context_len > 16 * (width - 4)


def test_warm_up_steps_hold_both_kinds_of_sequences_and_one_and_several_splits():
    layouts = warm_up_layouts(4096, 16)
    assert all(layout.num_decodes and layout.num_prefills for layout in layouts)
    assert {num_splits(layout.max_decode_context) > 1 for layout in layouts} == {False, True}


def test_a_block_table_that_is_too_short_is_refused():
    batch = [SequenceSlice([1, 2, 3], 3, [0], True)]
    with pytest.raises(AssertionError, match="1 blocks, 2 needed"):
        Staging(HostDevice()).upload(layout_of(batch, 4), batch, 4)
