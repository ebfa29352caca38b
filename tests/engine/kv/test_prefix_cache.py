"""Content addresses: equal content is found, anything else never, tenants never see each other."""

from __future__ import annotations

import pytest
from engine_oracle import make_sequence

from pdserve.engine.kv.block_pool import BlockState
from pdserve.engine.kv.block_tables import BlockTables
from pdserve.engine.kv.prefix_cache import BlockIdentity, PrefixCache


@pytest.fixture
def tables():
    return BlockTables(8, 4, is_cache_on=True, cache_key=b"secret")


def _compute(tables, sequence):
    tables.take(sequence, [], tables.num_blocks_for(sequence.num_tokens))
    sequence.num_computed_tokens = sequence.num_tokens
    tables.remember(sequence, 0)


def test_the_hash_depends_on_parent_tokens_salt_and_key():
    cache = PrefixCache(b"key")
    base = BlockIdentity(b"p" * 16, (1, 2, 3, 4), "tenant")
    others = [
        base._replace(parent=b"q" * 16),
        base._replace(parent=b""),
        base._replace(token_ids=(1, 2, 4, 3)),
        base._replace(salt="tenants"),
        base._replace(token_ids=(1, 2, 3), salt="4tenant"),
    ]
    hashes = {cache.chain_hash(identity) for identity in [base, *others]} | {PrefixCache(b"other").chain_hash(base)}
    assert len(hashes) == 7
    assert cache.chain_hash(base) == PrefixCache(b"key").chain_hash(base), "two workers agree"
    assert len(cache.chain_hash(base)) == 16


def test_a_colliding_hash_is_no_hit():
    cache = PrefixCache(b"key")
    mine, foreign = BlockIdentity(b"", (1, 2), ""), BlockIdentity(b"", (3, 4), "")
    cache.insert(b"same hash", foreign, 5)
    assert cache.find(b"same hash", mine) is None
    assert cache.find(b"same hash", foreign) == 5


def test_only_full_blocks_of_the_same_tenant_are_found(tables):
    _compute(tables, make_sequence(list(range(10)), cache_salt="a"))
    assert len(tables.find_prefix(make_sequence(list(range(10)), cache_salt="a"), 10)) == 2
    assert len(tables.find_prefix(make_sequence(list(range(10)), cache_salt="a"), 7)) == 1
    assert tables.find_prefix(make_sequence(list(range(10)), cache_salt="b"), 10) == []
    assert len(tables.find_prefix(make_sequence([0, 1, 2, 3, 9, 9, 9, 9], cache_salt="a"), 8)) == 1
    assert tables.find_prefix(make_sequence([9, *range(1, 10)], cache_salt="a"), 10) == []


def test_content_stays_findable_after_release_until_its_blocks_are_needed(tables):
    sequence = make_sequence(list(range(8)))
    _compute(tables, sequence)
    tables.give_back(sequence)
    assert tables.pool.report().by_state["cached"] == 2
    other = make_sequence(list(range(50, 81)))
    tables.take(other, [], 7)
    assert len(tables.find_prefix(make_sequence(list(range(8))), 8)) == 1, "the tail is evicted first"
    tables.pool.check_integrity()


def test_equal_content_computed_twice_is_kept_once(tables):
    twins = [make_sequence(list(range(8))) for _ in range(2)]
    for sequence in twins:
        _compute(tables, sequence)
    for sequence in twins:
        tables.give_back(sequence)
    assert tables.pool.report().by_state["cached"] == 2
    tables.pool.check_integrity()


def test_unproven_content_is_never_remembered(tables):
    sequence = make_sequence(list(range(8)), is_cacheable=False)
    _compute(tables, sequence)
    tables.give_back(sequence)
    assert tables.pool.report().by_state["cached"] == 0


def test_hits_are_pinned_before_fresh_blocks_are_taken(tables):
    first = make_sequence(list(range(28)))
    _compute(tables, first)
    tables.give_back(first)
    again = make_sequence(list(range(28)))
    hits = tables.find_prefix(again, 27)
    assert not tables.fits(9, hits, 0)
    assert tables.fits(8, hits, 0)
    assert not tables.fits(8, hits, 1)
    tables.take(again, hits, 8)
    assert again.block_table[:6] == hits
    assert len(set(again.block_table)) == 8
    assert tables.pool.check_integrity().by_state == {
        **dict.fromkeys((state.label for state in BlockState), 0),
        "owned": 8,
    }
