"""Which blocks each sequence has: prefix hits, fresh blocks, growth, and giving back. Never a tensor, never a policy.

All accounting is the block pool's: nothing here counts blocks on its own, so nothing can drift. Every
operation is all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.engine.kv.block_pool import BlockPool, BlockState, Holder
from pdserve.engine.kv.prefix_cache import BlockIdentity, PrefixCache
from pdserve.engine.sequence import Sequence


def holder_of(sequence: Sequence, kind: BlockState) -> Holder:
    """The name under which a sequence's attempt holds blocks."""
    return Holder(kind, str(sequence.key))


class BlockTables:
    """Gives sequences their blocks.

    Args:
        num_blocks: blocks in the KV cache.
        block_size: tokens in a block.
        is_cache_on: whether full blocks are found again by their content.
        cache_key: secret of the prefix cache.
    """

    def __init__(self, num_blocks: int, block_size: int, *, is_cache_on: bool, cache_key: bytes) -> None:
        self.block_size = block_size
        self.is_cache_on = is_cache_on
        self.prefix_cache = PrefixCache(cache_key)
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.forget)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def chain_hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Chain hashes of the first `num_blocks` full blocks; computed once and kept in the sequence."""
        assert num_blocks * self.block_size <= sequence.num_tokens, (num_blocks, sequence.num_tokens)
        self._extend_hashes(sequence, num_blocks)
        return sequence.block_hashes[:num_blocks]

    def find_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Cached blocks of the sequence's longest known prefix, at most `max_tokens` long. Takes nothing."""
        if not self.is_cache_on:
            return []
        return list(self._hits(sequence, max_tokens // self.block_size))

    def fits(self, num_blocks: int, hits: list[int], headroom_blocks: int) -> bool:
        """Whether `take` of these would leave `headroom_blocks` available."""
        num_hits_available = sum(self.pool.ref_count(block_id) == 0 for block_id in hits)
        return self.pool.num_available - num_hits_available - (num_blocks - len(hits)) >= headroom_blocks

    def take(
        self, sequence: Sequence, hits: list[int], num_blocks: int, fresh_kind: BlockState = BlockState.OWNED
    ) -> None:
        """Give the sequence its prefix hits (owned) and fresh blocks up to `num_blocks` in all.

        Raises:
            NoCapacityError: too few blocks; nothing was taken.
        """
        assert not sequence.block_table, f"{sequence.key} has blocks already"
        owned = holder_of(sequence, BlockState.OWNED)
        self.pool.share(owned, hits)  # first: fresh blocks must not evict the hits
        try:
            fresh = self.pool.take(holder_of(sequence, fresh_kind), num_blocks - len(hits))
        except BaseException:
            self.pool.release(owned)
            raise
        sequence.block_table = hits + fresh

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the sequence's blocks cover `num_tokens`.

        Raises:
            NoCapacityError: too few blocks; nothing was taken.
        """
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self.pool.take(holder_of(sequence, BlockState.OWNED), missing)

    def give_back(self, sequence: Sequence) -> None:
        """Release what the sequence owns; full blocks stay findable until they are handed out again."""
        self.pool.release(holder_of(sequence, BlockState.OWNED))
        sequence.block_table = []

    def num_yielded(self, sequence: Sequence) -> int:
        """Blocks that would become available if the sequence gave its own back."""
        return sum(self.pool.ref_count(block_id) == 1 for block_id in sequence.block_table)

    def remember(self, sequence: Sequence, num_tokens_before: int) -> None:
        """Enter the blocks that became full since `num_tokens_before` tokens were computed into the prefix cache."""
        if not (self.is_cache_on and sequence.is_cacheable):
            return
        num_full = sequence.num_computed_tokens // self.block_size
        hashes = self.chain_hashes(sequence, num_full)
        for index in range(num_tokens_before // self.block_size, num_full):
            block_id = sequence.block_table[index]
            if self.prefix_cache.insert(hashes[index], self._identity(sequence, index), block_id):
                self.pool.mark_cached(block_id)

    # --- inner workings

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        while (index := len(sequence.block_hashes)) < num_blocks:
            sequence.block_hashes.append(self.prefix_cache.chain_hash(self._identity(sequence, index)))

    def _identity(self, sequence: Sequence, index: int) -> BlockIdentity:
        parent = sequence.block_hashes[index - 1] if index else b""
        tokens = sequence.tokens(index * self.block_size, (index + 1) * self.block_size)
        return BlockIdentity(parent, tuple(tokens), sequence.cache_salt)

    def _hits(self, sequence: Sequence, max_blocks: int) -> Iterator[int]:
        for index in range(max_blocks):
            self._extend_hashes(sequence, index + 1)
            block_id = self.prefix_cache.find(sequence.block_hashes[index], self._identity(sequence, index))
            if block_id is None:
                return
            yield block_id
