"""The block pool and its KV ledger: who holds which block, provably.

A block is held by any number of *holders*, each a (kind, name) pair: kind is owned, leased, receiving or
quarantined, name the attempt (or READ) it is held for. A block without a holder is *cached* when the
prefix cache still finds it by its hash, else *free*. A block's state is the highest of

    quarantined > receiving > leased > owned > cached > free

Free and cached blocks are handed out in least-recently-used order (free ones first), so that evicting the
prefix cache needs no pass of its own; blocks never used before come first of all, in ascending order. The pool
is touched by one thread only and never sees a tensor.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.errors import NoCapacityError


class BlockState(enum.IntEnum):
    """Ordered: a block's state is the highest of its holders' kinds."""

    FREE = 0
    CACHED = 1
    OWNED = 2
    LEASED = 3
    RECEIVING = 4
    QUARANTINED = 5

    @property
    def label(self) -> str:
        """Lower-case name, as in metrics and /debug/kv."""
        return self.name.lower()


class Holder(NamedTuple):
    """Who holds blocks: a kind above CACHED, and a unique name (an attempt key, a READ's name)."""

    kind: BlockState
    name: str


class LedgerError(AssertionError):
    """The KV ledger does not add up: a defect, with the numbers in the message."""


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """A picture of the pool, as `GET /debug/kv` shows it."""

    total: int
    by_state: dict[str, int]
    by_request: dict[str, dict[str, int]]


class BlockPool:
    """Hands out block ids and remembers every holder.

    Args:
        num_blocks: blocks in the KV cache.
        on_evict: called with a block id whose cached content is about to be given away.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block_id: None) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.num_ever_used = 0
        """Blocks [0, num_ever_used) have been handed out before, the others never."""
        self.on_first_use: Callable[[int], None] = lambda num_ever_used: None
        """Called when that number has grown."""
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._holders: dict[Holder, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # evictable, least recently used first
        self._hashed: set[int] = set()  # blocks that the prefix cache can find, held or not

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free or cached."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """Number of holders that list this block."""
        return self._ref_counts[block_id]

    def blocks_of(self, holder: Holder) -> list[int]:
        """A copy of the blocks that this holder lists, in the order they were given."""
        return list(self._holders.get(holder, ()))

    def holders(self) -> list[Holder]:
        """All holders that list at least one block."""
        return list(self._holders)

    def take(self, holder: Holder, num_blocks: int) -> list[int]:
        """Hand out `num_blocks` fresh blocks to a holder: all or nothing.

        Raises:
            NoCapacityError: fewer are available; nothing was taken.
        """
        if num_blocks > self.num_available:
            raise NoCapacityError(f"{num_blocks} KV blocks wanted, {self.num_available} of {self.num_blocks} available")
        block_ids = [self._pop_available() for _ in range(num_blocks)]
        self._list(holder, block_ids)
        self._note_first_use(block_ids)
        return block_ids

    def share(self, holder: Holder, block_ids: Iterable[int]) -> None:
        """Make a holder list blocks that hold content already (prefix hits, a lease on owned blocks)."""
        block_ids = list(block_ids)
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0 or block_id in self._cached, f"block {block_id} is free"
            self._cached.pop(block_id, None)
        self._list(holder, block_ids)

    def release(self, holder: Holder) -> list[int]:
        """Forget a holder. Blocks with no holder left become cached or free. Returns its blocks; unknown: none."""
        block_ids = self._holders.pop(holder, [])
        # Last blocks first: the tail of a prompt is the least likely to be shared, so it is evicted first.
        for block_id in reversed(block_ids):
            self._unref(block_id)
        return block_ids

    def move(self, source: Holder, target: Holder) -> None:
        """Change what a holder's blocks are held for (owned → leased, receiving → owned, receiving → quarantined)."""
        block_ids = self._holders.pop(source, None)
        if block_ids:
            self._holders.setdefault(target, []).extend(block_ids)

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache can now find this block (which some holder holds)."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not held"
        self._hashed.add(block_id)

    def report(self) -> LedgerReport:
        """Count blocks by state, and by request and state."""
        states = self._states()
        by_state = {state.label: 0 for state in BlockState}
        for state in states:
            by_state[state.label] += 1
        by_request: dict[str, dict[str, int]] = {}
        for holder, block_ids in self._holders.items():
            counts = by_request.setdefault(holder.name, {})
            counts[holder.kind.label] = counts.get(holder.kind.label, 0) + len(block_ids)
        return LedgerReport(self.num_blocks, by_state, by_request)

    def check_integrity(self) -> LedgerReport:
        """Prove that reference counts equal the listed holders, that states partition the pool, and their sum.

        Raises:
            LedgerError: with the block and the numbers that disagree.
        """
        counted: dict[int, int] = defaultdict(int)
        for holder, block_ids in self._holders.items():
            if not block_ids:
                raise LedgerError(f"{holder} lists no block")
            if len(set(block_ids)) != len(block_ids):
                raise LedgerError(f"{holder} lists a block twice: {block_ids}")
            for block_id in block_ids:
                counted[block_id] += 1
        for block_id in range(self.num_blocks):
            places = (self._ref_counts[block_id] > 0) + (block_id in self._free) + (block_id in self._cached)
            if places != 1:
                raise LedgerError(f"block {block_id} is in {places} of held, free, cached")
            if counted[block_id] != self._ref_counts[block_id]:
                raise LedgerError(
                    f"block {block_id}: {counted[block_id]} holders, reference count {self._ref_counts[block_id]}"
                )
            if block_id in self._cached and block_id not in self._hashed:
                raise LedgerError(f"block {block_id} is cached but has no hash")
            if block_id in self._free and block_id in self._hashed:
                raise LedgerError(f"block {block_id} is free but has a hash")
        report = self.report()
        if sum(report.by_state.values()) != self.num_blocks:
            raise LedgerError(f"states add up to {sum(report.by_state.values())}, pool has {self.num_blocks}")
        return report

    # --- inner workings

    def _states(self) -> list[BlockState]:
        states = [BlockState.FREE] * self.num_blocks
        for block_id in self._cached:
            states[block_id] = BlockState.CACHED
        for holder, block_ids in self._holders.items():
            for block_id in block_ids:
                states[block_id] = max(states[block_id], holder.kind)
        return states

    def _pop_available(self) -> int:
        if self._free:
            return self._free.popitem(last=False)[0]
        block_id, _ = self._cached.popitem(last=False)
        self._hashed.discard(block_id)
        self._on_evict(block_id)
        return block_id

    def _note_first_use(self, block_ids: list[int]) -> None:
        num_ever_used = max(block_ids, default=-1) + 1
        if num_ever_used > self.num_ever_used:
            self.num_ever_used = num_ever_used
            self.on_first_use(num_ever_used)

    def _list(self, holder: Holder, block_ids: list[int]) -> None:
        if not block_ids:
            return
        for block_id in block_ids:
            self._ref_counts[block_id] += 1
        self._holders.setdefault(holder, []).extend(block_ids)

    def _unref(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            (self._cached if block_id in self._hashed else self._free)[block_id] = None
