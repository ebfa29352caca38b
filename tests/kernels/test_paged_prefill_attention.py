from __future__ import annotations

import pytest
import torch
from paged import make_layer
from tolerances import assert_close

from pdserve.kernels.reference import packed_attention as reference
from pdserve.kernels.reference import paged_attention as reference_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
OPTIONS = [{}, {"sliding_window": 1}, {"sliding_window": 37}, {"softcap": 3.0}, {"sliding_window": 70, "softcap": 9.0}]


def _arguments(query_lens, context_lens, heads, kv_heads, head_dim, dtype, block_size=16, **options):
    layer, tables, lens = make_layer(context_lens, kv_heads, head_dim, dtype=dtype, block_size=block_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = torch.randn(sum(query_lens), heads, head_dim, dtype=dtype)
    named = {"max_query_len": max(query_lens), "scaling": head_dim**-0.5, **options}
    return (query, layer, starts, lens, tables), named


def _compare(interpreted, *shape, **options):
    positional, named = _arguments(*shape, **options)
    expected = reference_attention.paged_prefill_attention(*positional, **named)
    assert_close(interpreted(*positional, **named), expected)


@DTYPES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_batches_equal_the_twin(interpreted, options, dtype):
    """Whole prompts, later chunks, single tokens, and a sequence without queries."""
    _compare(interpreted, [7, 1, 0, 65, 30], [7, 90, 16, 65, 131], 4, 2, 16, dtype, **options)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 16), (3, 3, 20), (6, 2, 80), (4, 2, 128), (2, 1, 256)]
)
def test_head_counts_and_dimensions(interpreted, heads, kv_heads, head_dim, dtype):
    _compare(interpreted, [5, 33], [5, 40], heads, kv_heads, head_dim, dtype)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_block_sizes(interpreted, block_size):
    _compare(interpreted, [1, 67], [1, 77], 2, 1, 16, torch.float32, block_size=block_size)


@pytest.mark.parametrize("context_len", [16, 500 * 16], ids=["1-block", "500-blocks"])
def test_short_and_long_tables(interpreted, context_len):
    _compare(interpreted, [13], [context_len], 2, 1, 16, torch.float32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_twin_is_the_reference_attention(options):
    query_lens, context_lens = [7, 1, 65, 30], [7, 90, 65, 131]
    positional, named = _arguments(query_lens, context_lens, 4, 2, 16, torch.float32, **options)
    starts = [context - queries for context, queries in zip(context_lens, query_lens, strict=True)]
    batch = reference.pack(query_lens, starts, positional[4].tolist(), 16)
    expected = reference.paged_attention(positional[0], positional[1], batch, scaling=named["scaling"], **options)
    twin = reference_attention.paged_prefill_attention(*positional, **named)
    torch.testing.assert_close(twin, expected, atol=2e-6, rtol=2e-5)
