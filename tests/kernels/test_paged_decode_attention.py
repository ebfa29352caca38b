from __future__ import annotations

import pytest
import torch
from paged import make_layer
from tolerances import assert_close

from pdserve.kernels.paged_decode_attention import tile_for
from pdserve.kernels.reference import packed_attention as reference
from pdserve.kernels.reference import paged_attention as reference_attention
from pdserve.kernels.splits import SPLIT_TOKENS, workspace_bytes

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
OPTIONS = [{}, {"sliding_window": 1}, {"sliding_window": 37}, {"softcap": 3.0}, {"sliding_window": 300, "softcap": 9.0}]


def _compare(interpreted, context_lens, heads, kv_heads, head_dim, dtype, block_size=16, **options):
    layer, tables, lens = make_layer(context_lens, kv_heads, head_dim, dtype=dtype, block_size=block_size)
    query = torch.randn(len(context_lens), heads, head_dim, dtype=dtype)
    arguments = {"max_context_len": max(context_lens), "scaling": head_dim**-0.5, **options}
    result = interpreted(query, layer, tables, lens, **arguments)
    assert_close(result, reference_attention.paged_decode_attention(query, layer, tables, lens, **arguments))
    return result


@DTYPES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_batches_equal_the_twin(interpreted, options, dtype):
    _compare(interpreted, [1, 0, 33, 256, 257, 600, 15], 4, 2, 32, dtype, **options)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 16), (3, 3, 20), (6, 2, 80), (8, 1, 64), (4, 2, 128), (2, 1, 256)]
)
def test_head_counts_and_dimensions(interpreted, heads, kv_heads, head_dim, dtype):
    _compare(interpreted, [5, 290], heads, kv_heads, head_dim, dtype)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_block_sizes(interpreted, block_size):
    _compare(interpreted, [1, 130, 77], 2, 1, 16, torch.float32, block_size=block_size)


@pytest.mark.parametrize("context_len", [16, 500 * 16], ids=["1-block", "500-blocks"])
def test_short_and_long_tables(interpreted, context_len):
    _compare(interpreted, [context_len], 4, 2, 16, torch.float32)


def test_a_row_is_bit_equal_whatever_shares_the_batch_and_however_long_the_others_are(interpreted):
    """Splits begin at fixed positions, and their merge is in order."""
    lens = [SPLIT_TOKENS - 3, 1, 2 * SPLIT_TOKENS + 5, 40]
    layer, tables, context_lens = make_layer(lens, 2, 32, dtype=torch.float32, block_size=16)
    query = torch.randn(4, 4, 32)
    together = interpreted(query, layer, tables, context_lens, max_context_len=5000, scaling=0.2)
    for row, length in enumerate(lens):
        one = slice(row, row + 1)
        alone = interpreted(query[one], layer, tables[one], context_lens[one], max_context_len=length, scaling=0.2)
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_twin_is_the_reference_attention(options):
    lens = [1, 33, 256, 300]
    layer, tables, context_lens = make_layer(lens, 2, 16, dtype=torch.float32, block_size=16)
    query = torch.randn(4, 4, 16)
    batch = reference.pack([1] * 4, [length - 1 for length in lens], tables.tolist(), 16)
    expected = reference.paged_attention(query, layer, batch, scaling=0.2, **options)
    twin = reference_attention.paged_decode_attention(
        query, layer, tables, context_lens, max_context_len=300, scaling=0.2, **options
    )
    torch.testing.assert_close(twin, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_splits_are_whole_tiles(head_dim, itemsize):
    assert SPLIT_TOKENS % tile_for(head_dim, itemsize).tokens == 0


def test_the_workspace_is_what_the_partial_results_take():
    assert workspace_bytes(8, 4, 64, SPLIT_TOKENS) == 0
    assert workspace_bytes(8, 4, 64, 2 * SPLIT_TOKENS + 1) == 8 * 4 * 3 * 66 * 4
