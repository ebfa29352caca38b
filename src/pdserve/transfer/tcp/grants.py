"""Which hand-off may read which blocks. Written by the worker, read by the server's threads."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading

from pdserve.reasons import TransferReason


class Grants:
    """Nonce → blocks. Nonces are looked up by a keyed hash, so that timing tells nothing about them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._granted: dict[bytes, tuple[bytes, set[int]]] = {}

    def allow(self, nonce: str, block_ids: list[int]) -> None:
        """A hand-off may read these blocks, too."""
        with self._lock:
            self._granted.setdefault(self._hash(nonce), (nonce.encode(), set()))[1].update(block_ids)

    def forget(self, nonce: str) -> None:
        """A hand-off reads nothing any more; unknown: nothing."""
        with self._lock:
            self._granted.pop(self._hash(nonce), None)

    def refusal(self, nonce: str, block_ids: list[int]) -> TransferReason | None:
        """Why a hand-off may not read these blocks; None: it may."""
        with self._lock:
            known, allowed = self._granted.get(self._hash(nonce), (b"", set()))
            if not hmac.compare_digest(known, nonce.encode()) or not nonce:
                return TransferReason.NONCE
            return None if allowed.issuperset(block_ids) else TransferReason.LOOKUP

    def _hash(self, nonce: str) -> bytes:
        return hashlib.blake2b(nonce.encode(), digest_size=16, key=self._key).digest()
