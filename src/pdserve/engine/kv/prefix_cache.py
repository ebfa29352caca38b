"""The prefix cache: finds full blocks by their content. Knows hashes and block ids; never a tensor or a holder.

A full block is addressed by a chain hash: keyed BLAKE2b-128 over (hash of the block before, token ids, tenant
salt). The key makes hashes unguessable outside the service, the salt keeps tenants apart. A hit is believed only
after the stored identity (parent, token ids, salt) was compared. Which blocks stay is the block pool's business.
"""

from __future__ import annotations

import array
import hashlib
from typing import NamedTuple

HASH_BYTES = 16


class BlockIdentity(NamedTuple):
    """What a full block holds."""

    parent: bytes
    """Chain hash of the block before; empty for a sequence's first block."""
    token_ids: tuple[int, ...]
    salt: str


class PrefixCache:
    """Maps chain hashes to block ids.

    Args:
        key: secret of the service, at most 64 bytes; hashes of two services are comparable when it is equal.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._block_of: dict[bytes, int] = {}
        self._entries: dict[int, tuple[bytes, BlockIdentity]] = {}

    def chain_hash(self, identity: BlockIdentity) -> bytes:
        """The hash under which a full block is found, 16 bytes."""
        digest = hashlib.blake2b(digest_size=HASH_BYTES, key=self._key)
        digest.update(len(identity.parent).to_bytes(1, "little") + identity.parent)
        digest.update(array.array("q", identity.token_ids).tobytes())
        digest.update(identity.salt.encode())
        return digest.digest()

    def find(self, chain_hash: bytes, identity: BlockIdentity) -> int | None:
        """The block that holds exactly this content, if any."""
        block_id = self._block_of.get(chain_hash)
        if block_id is None or self._entries[block_id][1] != identity:
            return None
        return block_id

    def insert(self, chain_hash: bytes, identity: BlockIdentity, block_id: int) -> bool:
        """Remember a full block. False: this content is known already, under another block, which stays the one."""
        if chain_hash in self._block_of:
            return False
        assert block_id not in self._entries, f"block {block_id} is in the prefix cache already"
        self._block_of[chain_hash] = block_id
        self._entries[block_id] = (chain_hash, identity)
        return True

    def forget(self, block_id: int) -> None:
        """The block's content is about to be given away."""
        chain_hash, _ = self._entries.pop(block_id)
        del self._block_of[chain_hash]
