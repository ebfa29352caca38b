"""Transports inside one process: a READ copies blocks from one engine's KV cache to another's, and can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef, WorkerRegistration
from pdserve.transfer.base import Descriptor
from pdserve.transfer.descriptor import decode_descriptor, encode_descriptor, seal
from pdserve.transfer.digest import block_digests
from pdserve.transfer.memory import bytes_view
from pdserve.transfer.pulls.pull import PullOutcome

READ_S = 0.005
OnPull = Callable[[PullOutcome], None]


@dataclass(eq=False)
class Read:
    """One READ on its way."""

    ticket: int
    descriptor: Descriptor
    nonce: str
    remote_ids: list[int]
    local_ids: list[int]
    digests: list[bytes]
    on_end: OnPull
    on_terminal: OnPull


@dataclass(eq=False)
class Wire:
    """What connects the workers of a test."""

    sides: dict[WorkerRef, WireTransports] = field(default_factory=dict)


class WireTransports:
    """Stands for `WorkerTransports`: same methods, same guarantees, no thread.

    `holds` keeps READs on their way until `let_go`; an aborted one then is not terminal. `num_damaged` READs arrive
    with a changed byte.
    """

    def __init__(self, wire: Wire, kv_cache: torch.Tensor, *, kv_signature: str = "signature") -> None:
        self.kv_signature = kv_signature
        self.allowed: dict[str, set[int]] = {}
        self.reads: dict[int, Read] = {}
        self.num_reads = 0
        self.num_damaged = 0
        self.holds = False
        self.is_serving = False
        self._aborted: set[int] = set()
        self._wire = wire
        self._kv_cache = kv_cache
        self._ref: WorkerRef | None = None

    # --- life

    def open(self, ref: WorkerRef) -> None:
        self._ref, self._wire.sides[ref] = ref, self

    async def reopen(self, ref: WorkerRef) -> None:
        await self.close()
        self.open(ref)

    async def close(self) -> None:
        assert self._ref is not None
        del self._wire.sides[self._ref]
        self.allowed.clear()
        self.reads.clear()

    def announced(self) -> list[bytes]:
        assert self._ref is not None
        blocks = bytes_view(self._kv_cache)
        descriptor = Descriptor(
            backend="wire", worker_id=self._ref.worker_id, generation=self._ref.generation,
            num_blocks=blocks.shape[0], block_bytes=blocks.shape[1], kv_signature=self.kv_signature, payload=b"",
        )  # fmt: skip
        return [encode_descriptor(seal(descriptor))]

    # --- reading

    def find(self, registration: WorkerRegistration) -> Descriptor:
        return decode_descriptor(registration.descriptors[0])

    def prepare(self, registration: WorkerRegistration) -> None:
        """Nothing has to be connected."""

    def pull(
        self,
        descriptor: Descriptor,
        nonce: str,
        blocks: tuple[list[int], list[int], list[bytes]],
        *,
        on_end: OnPull,
        on_terminal: OnPull,
    ) -> int:
        self.num_reads += 1
        read = Read(self.num_reads, descriptor, nonce, *blocks, on_end, on_terminal)
        self.reads[read.ticket] = read
        if not self.holds:
            asyncio.get_running_loop().call_later(READ_S, self._end, read)
        return read.ticket

    def abort(self, ticket: int) -> None:
        read = self.reads.get(ticket)
        if read is None or ticket in self._aborted:
            return
        self._aborted.add(ticket)
        outcome = PullOutcome(ticket, reason=TransferReason.ABORTED, is_terminal=not self.holds)
        if not self.holds:
            del self.reads[ticket]
        asyncio.get_running_loop().call_soon(read.on_end, outcome)

    def let_go(self) -> None:
        """End the READs that were held."""
        self.holds = False
        for read in list(self.reads.values()):
            self._end(read)

    def _end(self, read: Read) -> None:
        if self.reads.pop(read.ticket, None) is None:
            return
        if read.ticket in self._aborted:
            self._copy(read)
            read.on_terminal(PullOutcome(read.ticket, reason=TransferReason.ABORTED))
            return
        reason = self._copy(read)
        num_bytes = 0 if reason else len(read.local_ids) * bytes_view(self._kv_cache).shape[1]
        read.on_end(PullOutcome(read.ticket, reason=reason, num_bytes=num_bytes))

    def _copy(self, read: Read) -> TransferReason | None:
        peer = self._wire.sides.get(read.descriptor.peer)
        if peer is None:
            return TransferReason.DISCONNECTED
        if not set(read.remote_ids) <= peer.allowed.get(read.nonce, set()):
            return TransferReason.NONCE
        self._kv_cache[read.local_ids] = peer._kv_cache[read.remote_ids]
        if self.num_damaged:
            self.num_damaged -= 1
            bytes_view(self._kv_cache)[read.local_ids[0], 0] ^= 0x40
        if read.digests and block_digests(self._kv_cache, read.local_ids) != read.digests:
            return TransferReason.VERIFY
        return None

    # --- being read from

    def expect(self, nonce: str, block_ids: list[int]) -> None:
        self.allowed.setdefault(nonce, set()).update(block_ids)

    def forget(self, nonce: str) -> None:
        self.allowed.pop(nonce, None)

    def set_serving(self, is_serving: bool) -> None:
        self.is_serving = is_serving
