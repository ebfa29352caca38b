"""The eager paged attention against a loop over single tokens in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels.reference import packed_attention as reference
from pdserve.kernels.reference.packed_attention import pack, paged_attention, write_kv

HEAD_DIM = 8
TOLERANCE = 2e-6  # float32 sums of at most a hundred terms of order one


def _naive(query, keys, values, starts, query_lens, *, scaling, sliding_window, softcap):
    """One query at a time; keys[i], values[i]: `[context_len, num_kv_heads, head_dim]` of sequence i."""
    rows, row = [], 0
    for start, length, key, value in zip(starts, query_lens, keys, values, strict=True):
        group = query.shape[1] // key.shape[1]
        for position in range(start, start + length):
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(query.shape[1]):
                scores = key[first : position + 1, head // group].double() @ query[row, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                rows.append(scores.softmax(0) @ value[first : position + 1, head // group].double())
            row += 1
    return torch.stack(rows).view(query.shape)


def _compare(
    starts, query_lens, *, block_size, heads, kv_heads, sliding_window=None, softcap=None, dtype=torch.float32
):
    generator = torch.Generator().manual_seed(len(starts) * 1000 + sum(query_lens))
    needed = [-(-(s + n) // block_size) for s, n in zip(starts, query_lens, strict=True)]
    num_blocks, num_layers, layer = sum(needed) + 3, 3, 1
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    cache = torch.full((num_blocks, num_layers, 2, block_size, kv_heads, HEAD_DIM), 1e3, dtype=dtype)
    view = cache[:, layer]
    keys = [
        torch.randn(s + n, kv_heads, HEAD_DIM, generator=generator) for s, n in zip(starts, query_lens, strict=True)
    ]
    values = [torch.randn(k.shape, generator=generator) for k in keys]
    if any(starts):  # what earlier steps computed
        early = [(s, t, k, v) for s, t, k, v in zip(starts, tables, keys, values, strict=True) if s]
        past = pack([s for s, *_ in early], [0] * len(early), [t for _, t, *_ in early], block_size)
        write_kv(
            torch.cat([k[:s] for s, _, k, _ in early]),
            torch.cat([v[:s] for s, *_, v in early]),
            view,
            past.slot_mapping,
        )
    batch = pack(query_lens, starts, tables, block_size)
    write_kv(
        torch.cat([k[s:] for s, k in zip(starts, keys, strict=True)]),
        torch.cat([v[s:] for s, v in zip(starts, values, strict=True)]),
        view,
        batch.slot_mapping,
    )
    query = torch.randn(sum(query_lens), heads, HEAD_DIM, generator=generator)
    options = {"scaling": 1 / math.sqrt(HEAD_DIM), "sliding_window": sliding_window, "softcap": softcap}
    result = paged_attention(query, view, batch, **options)
    keys, values = ([t.to(dtype).float() for t in tensors] for tensors in (keys, values))
    expected = _naive(query, keys, values, starts, query_lens, **options)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert (cache[:, 0] == 1e3).all()
    assert (cache[:, 2] == 1e3).all(), "another layer was written"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("sliding_window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_mixed_batch_equals_one_query_at_a_time(heads, kv_heads, sliding_window, softcap):
    _compare(
        [0, 9, 30, 16, 0, 3, 7],
        [7, 1, 1, 1, 1, 12, 1],
        block_size=4,
        heads=heads,
        kv_heads=kv_heads,
        sliding_window=sliding_window,
        softcap=softcap,
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 8, 16]),
    st.sampled_from([None, 2, 7, 64]),
)
def test_any_batch_equals_one_query_at_a_time(shape, block_size, sliding_window):
    starts, query_lens = map(list, zip(*shape, strict=True))
    _compare(starts, query_lens, block_size=block_size, heads=2, kv_heads=1, sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 10])
def test_long_chunks_are_cut_into_tiles_and_large_batches_into_groups(monkeypatch, sliding_window):
    monkeypatch.setattr(reference, "MAX_TILE_QUERIES", 8)
    monkeypatch.setattr(reference, "MAX_GROUP_SLOTS", 64)
    _compare([0, 5] + [20] * 9, [37, 24] + [1] * 9, block_size=4, heads=4, kv_heads=2, sliding_window=sliding_window)


def test_a_cache_of_half_precision_is_read_in_the_precision_of_the_query():
    _compare([0, 6], [5, 1], block_size=4, heads=4, kv_heads=2, dtype=torch.bfloat16)


def test_a_block_table_that_is_too_short_is_refused():
    with pytest.raises(AssertionError, match="has 1 blocks and needs 2"):
        pack([5], [0], [[3]], 4)
