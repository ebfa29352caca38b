"""The KV ledger under any order of operations, against a model of it in plain sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from pdserve.engine.kv.block_pool import BlockPool, BlockState, Holder, LedgerError
from pdserve.errors import NoCapacityError

NUM_BLOCKS = 9
HOLDER_KINDS = [BlockState.OWNED, BlockState.LEASED, BlockState.RECEIVING, BlockState.QUARANTINED]


class Ledger(RuleBasedStateMachine):
    """Random takes, shares, releases and moves; `held` and `cached` say what must be true."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, self.evicted.append)
        self.told_ever_used = [0]
        self.pool.on_first_use = self.told_ever_used.append
        self.ever_used: set[int] = set()
        self.held: dict[Holder, list[int]] = {}
        self.cached: set[int] = set()
        self.number = 0

    def _expect_evictions(self) -> None:
        for block_id in self.evicted:
            assert block_id in self.cached, "only cached content is evicted"
            assert not any(block_id in blocks for blocks in self.held.values()), "a held block was evicted"
            self.cached.remove(block_id)
        self.evicted.clear()

    @rule(target=holders, kind=st.sampled_from(HOLDER_KINDS), num_blocks=st.integers(1, 5))
    def take(self, kind, num_blocks):
        self.number += 1
        holder = Holder(kind, f"r{self.number}")
        num_free = NUM_BLOCKS - len({b for blocks in self.held.values() for b in blocks})
        assert self.pool.num_available == num_free
        if num_blocks > num_free:
            with pytest.raises(NoCapacityError):
                self.pool.take(holder, num_blocks)
            return multiple()
        taken = self.pool.take(holder, num_blocks)
        self._expect_evictions()
        assert len(set(taken)) == num_blocks
        assert not any(set(taken) & set(blocks) for blocks in self.held.values()), "a held block was handed out"
        assert not set(taken) & self.cached, "a block was handed out without its eviction being told"
        self.held[holder] = taken
        self.ever_used |= set(taken)
        return holder

    @rule(holder=holders)
    def release(self, holder):
        assert self.pool.release(holder) == self.held.pop(holder, [])

    @rule(target=holders, holder=holders)
    def lease(self, holder):
        target = Holder(BlockState.LEASED, f"lease of {holder.name}")
        if holder not in self.held or target in self.held:
            return multiple()
        self.pool.share(target, self.held[holder])
        self.held[target] = list(self.held[holder])
        return target

    @rule(target=holders, holder=holders, kind=st.sampled_from(HOLDER_KINDS))
    def move(self, holder, kind):
        self.number += 1
        target = Holder(kind, f"moved {self.number}")
        self.pool.move(holder, target)
        if holder not in self.held:
            return multiple()
        self.held[target] = self.held.pop(holder)
        return target

    @rule(holder=holders)
    def cache(self, holder):
        for block_id in self.held.get(holder, []):
            self.pool.mark_cached(block_id)
            self.cached.add(block_id)

    @rule(target=holders)
    def hit(self):
        """Take cached blocks up again."""
        self.number += 1
        holder = Holder(BlockState.OWNED, f"hit {self.number}")
        blocks = sorted(self.cached)[:2]
        self.pool.share(holder, blocks)
        if not blocks:
            return multiple()
        self.held[holder] = blocks
        return holder

    @invariant()
    def blocks_are_used_for_the_first_time_in_ascending_order(self):
        assert self.ever_used == set(range(self.pool.num_ever_used))
        assert self.told_ever_used == sorted(set(self.told_ever_used))
        assert self.told_ever_used[-1] == self.pool.num_ever_used

    @invariant()
    def adds_up(self):
        report = self.pool.check_integrity()
        expected = dict.fromkeys((state.label for state in BlockState), 0)
        for block_id in range(NUM_BLOCKS):
            kinds = [holder.kind for holder, blocks in self.held.items() if block_id in blocks]
            state = max(kinds, default=BlockState.CACHED if block_id in self.cached else BlockState.FREE)
            expected[state.label] += 1
            assert self.pool.ref_count(block_id) == len(kinds)
        assert report.by_state == expected
        for holder, blocks in self.held.items():
            assert self.pool.blocks_of(holder) == blocks


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_free_blocks_go_first_then_the_least_recently_released_tail_first():
    pool = BlockPool(4)
    first, second = Holder(BlockState.OWNED, "first"), Holder(BlockState.OWNED, "second")
    for holder in (first, second):
        for block_id in pool.take(holder, 2):
            pool.mark_cached(block_id)
    pool.release(second)
    pool.release(first)
    assert pool.take(Holder(BlockState.OWNED, "third"), 4) == [3, 2, 1, 0]


def test_a_block_listed_twice_by_one_holder_is_found():
    pool = BlockPool(2)
    holder = Holder(BlockState.OWNED, "a")
    pool.share(holder, pool.take(holder, 1))
    with pytest.raises(LedgerError, match="lists a block twice"):
        pool.check_integrity()


def test_a_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="block 1 is free"):
        BlockPool(2).share(Holder(BlockState.OWNED, "a"), [1])
