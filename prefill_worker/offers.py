"""Step 5 of 8: the prefill side of all hand-offs lends finished blocks to decode workers, under KV leases.

A decode worker's KvWant starts a lease; finished chunks are announced (KvReady) with their digests; KvRelease, expiry
or the end of a finished sequence ends the lease. A Cancel alone does not: a decode worker may still be reading.
Before: step 4, prefill_worker/worker.py, computes the blocks. After: step 6, decode_worker/hand_offs.py, READs them.
Never touches memory itself; the engine owns the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pdserve.engine.sequence import Sequence
from pdserve.log import get_logger
from pdserve.messages import AttemptKey, KvFailed, KvRelease, KvWant, LeaseRenewal, TokenLogprobs
from pdserve.prefill_worker.leases import LeaseTable
from pdserve.prefill_worker.offer import Offer, Reader
from pdserve.reasons import KvFailReason
from pdserve.registration import WorkerRef
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.sender import Sender
from pdserve.worker.tasks import TaskSet
from pdserve.worker.transports import WorkerTransports
from pdserve.worker.watch import WorkerWatch

logger = get_logger(__name__)


class Offers:
    """Every offer of one prefill worker; all methods run on the event loop.

    Args:
        sender: tells the decode workers.
        engine_thread: owns the blocks that are lent.
        transports: let peers READ.
        leases: when each promise ends.
        watch: notes what happens as metrics.
        block_digests: block ids → digests, runs in a thread; None with INTEGRITY=off.
    """

    def __init__(
        self,
        sender: Sender,
        engine_thread: EngineThread,
        transports: WorkerTransports,
        leases: LeaseTable,
        watch: WorkerWatch,
        *,
        block_digests: Callable[[list[int]], list[bytes]] | None,
    ) -> None:
        self._sender = sender
        self._thread = engine_thread
        self._transports = transports
        self._leases = leases
        self._watch = watch
        self._block_digests = block_digests
        self._on_lease_over: Callable[[AttemptKey], None] = lambda key: None
        self._offers: dict[AttemptKey, Offer] = {}
        self._digesting: set[AttemptKey] = set()
        self._digest_pool = ThreadPoolExecutor(1, thread_name_prefix="digest")
        self._tasks = TaskSet()

    def report_to(self, on_lease_over: Callable[[AttemptKey], None]) -> None:
        """Set who is told when a completed sequence's blocks are needed no more."""
        self._on_lease_over = on_lease_over

    @property
    def num_leases(self) -> int:
        """KV leases that hold blocks."""
        return len(self._leases)

    # --- what happens to the sequence

    def open(self, sequence: Sequence) -> None:
        """A prompt was taken; its blocks can be wanted from now on."""
        engine = self._thread.engine
        has_digests, chain_hashes = self._block_digests is not None, engine.chain_hashes(sequence)
        self._offers[sequence.key] = Offer(sequence, engine.block_size, chain_hashes, has_digests)

    def progress(self, sequence: Sequence, token0: int | None, logprobs: TokenLogprobs | None) -> None:
        """A chunk is complete; with the last one token 0 is known and the lease begins, reader or not."""
        offer = self._offers.get(sequence.key)
        if offer is None or offer.is_over:
            return
        offer.advance(sequence.num_computed_tokens)
        if token0 is not None:
            offer.token0, offer.token0_logprobs = token0, logprobs
            if sequence.key not in self._leases:
                self._grant(offer)
        self._announce(offer)

    def end(self, key: AttemptKey, failure: KvFailReason | None = None) -> None:
        """The attempt ended here. Blocks that a decode worker may be reading stay leased until it says otherwise."""
        offer = self._offers.get(key)
        if offer is None:
            return
        if failure is not None and offer.reader is not None and not offer.is_over:
            self._send_failed(key, offer.reader.peer, failure)
        offer.is_over = True
        if offer.reader is None:
            self.close(key)

    def close(self, key: AttemptKey) -> None:
        """No decode worker reads these blocks (any more): no offer, no lease."""
        if self._offers.pop(key, None) is not None:
            self._unlease(key)

    def close_all(self) -> None:
        """Everything is given up, readers are told by their own clocks."""
        for key in list(self._offers):
            self.close(key)

    # --- what decode workers say

    def want(self, message: KvWant, *, is_buried: bool) -> None:
        """A decode worker has reserved its blocks and wants ours."""
        peer = message.worker
        refusal = self._want_refusal(message, is_buried=is_buried)
        if refusal is not None:
            self._watch.hand_off_rejected(refusal)
            self._send_failed(message.key, peer, refusal)
            return
        self._tasks.spawn(self._lend(self._offers[message.key], peer))

    def release(self, message: KvRelease) -> None:
        """A decode worker needs our blocks no more."""
        offer = self._offers.get(message.key)
        if offer is None or offer.reader is None or offer.reader.peer != message.worker:
            self._watch.late_message("unknown")
        elif message.is_complete or offer.is_over:
            self._end_lease(offer)
        else:
            offer.reader = None  # the lease runs on: the gateway may send another decode worker

    def renew(self, message: LeaseRenewal) -> None:
        """A decode worker's heartbeat: renew, announce again what it missed, or tell that we know nothing."""
        peer = message.worker
        for item in message.items:
            offer = self._offers.get(item.key)
            if offer is None or (offer.reader is not None and offer.reader.peer != peer):
                self._send_failed(item.key, peer, KvFailReason.UNKNOWN if offer is None else KvFailReason.STALE)
                continue
            if offer.reader is None:
                continue  # its KvWant was lost; it comes again with the next heartbeat
            self._leases.renew(item.key)
            offer.rewind(item.num_announced_blocks, item.has_token0)
            self._announce(offer)

    def expire(self) -> None:
        """End the leases that were not renewed in time."""
        for key in self._leases.expire():
            logger.warning("KV lease of %s expired", key)
            self._watch.lease_expired()
            offer = self._offers.get(key)
            if offer is None:
                self._unlease(key)
                continue
            if offer.reader is not None:
                self._send_failed(key, offer.reader.peer, KvFailReason.EXPIRED)
            self._end_lease(offer)

    # --- inner workings

    def _want_refusal(self, message: KvWant, *, is_buried: bool) -> KvFailReason | None:
        offer = self._offers.get(message.key)
        if offer is None or offer.is_over:
            if is_buried or offer is not None:
                return KvFailReason.STALE
            is_forged = any(key[:3] == message.key[:3] for key in self._offers)
            return KvFailReason.NONCE if is_forged else KvFailReason.UNKNOWN
        return None if message.kv_signature == self._transports.kv_signature else KvFailReason.GEOMETRY

    async def _lend(self, offer: Offer, peer: WorkerRef) -> None:
        if offer.reader is None or offer.reader.peer != peer:
            offer.reader = Reader(peer)
        await self._thread.call(lambda engine: engine.grant_lease(offer.sequence))
        if self._offers.get(offer.key) is offer:
            self._grant(offer)
            self._announce(offer)

    def _announce(self, offer: Offer) -> None:
        if offer.blocks_without_digest() and offer.key not in self._digesting:
            self._tasks.spawn(self._digest(offer))
        message = offer.next_announcement(self._sender.ref)
        if message is not None and offer.reader is not None:
            self._transports.expect(message.nonce, message.block_ids)
            self._sender.to_worker(offer.reader.peer, message)

    async def _digest(self, offer: Offer) -> None:
        assert self._block_digests is not None
        loop = asyncio.get_running_loop()
        self._digesting.add(offer.key)
        try:
            while block_ids := offer.blocks_without_digest():
                digests = await loop.run_in_executor(self._digest_pool, self._block_digests, block_ids)
                offer.digests.extend(digests)
                if self._offers.get(offer.key) is not offer:
                    return
                self._announce(offer)
        finally:
            self._digesting.discard(offer.key)

    def _grant(self, offer: Offer) -> None:
        self._leases.grant(offer.key, offer.sequence.deadline_s)
        self._transports.set_serving(True)

    def _end_lease(self, offer: Offer) -> None:
        """A completed (or ended) sequence is over with its lease; one still being computed goes on without reader."""
        if offer.token0 is None and not offer.is_over:
            offer.reader = None
            self._unlease(offer.key)
            return
        self.close(offer.key)
        self._on_lease_over(offer.key)

    def _unlease(self, key: AttemptKey) -> None:
        if key in self._leases:
            self._leases.release(key)
        self._transports.forget(key.nonce)
        self._thread.post(lambda engine: engine.release_lease(key))
        self._transports.set_serving(len(self._leases) > 0)

    def _send_failed(self, key: AttemptKey, peer: WorkerRef, reason: KvFailReason) -> None:
        self._sender.to_worker(peer, KvFailed(**key._asdict(), **self._sender.ref._asdict(), reason=reason))
