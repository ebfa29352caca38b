"""A worker's transports and its transfer threads, as the event loop sees them.

Knows descriptors (ours and those in registrations) and callbacks on the loop; the copying is the transfer
threads'. With a new generation everything is torn down and built anew: a fence for all old READs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from pdserve.errors import TransferError
from pdserve.ids import KvSignature, Nonce
from pdserve.log import get_logger
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef, WorkerRegistration
from pdserve.transfer.base import Descriptor, Transport
from pdserve.transfer.choose import choose_backend
from pdserve.transfer.descriptor import decode_descriptor, encode_descriptor
from pdserve.transfer.pulls.pull import PullFaults, PullOutcome, PullRequest, Ticket
from pdserve.transfer.pulls.puller import Puller
from pdserve.transfer.pulls.quarantine import QuarantineLimits

logger = get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 5
"""Transfers that failed since the last good one: more, and the worker is not ready."""

T = TypeVar("T")
OnPull = Callable[[PullOutcome], None]


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How transports are made."""

    setting: str
    """Which transports are wanted: auto | nixl | tcp."""
    kv_signature: KvSignature
    quarantine_s: float
    read_timeout_s: float
    make: Callable[[], list[Transport]]
    """Fresh transports, preferred first."""
    num_threads: int = 2
    """Transfer threads: one is enough for a worker that never reads."""
    verifies: bool = True
    """Whether blocks are compared with their announced digests (INTEGRITY)."""
    faults: PullFaults | None = None


class WorkerTransports:
    """All transports of one worker; every method runs on the event loop.

    Args:
        kv_cache: `[num_blocks, …]`, readable by peers from `open` on.
    """

    def __init__(self, kv_cache: torch.Tensor, options: TransportOptions) -> None:
        self._kv_cache = kv_cache
        self._options = options
        self._transports: dict[str, Transport] = {}
        self._descriptors: dict[str, Descriptor] = {}
        self._puller: Puller | None = None
        self._choices: dict[WorkerRef, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_pulls = 0

    @property
    def kv_signature(self) -> KvSignature:
        """What our KV blocks mean; only workers with the same one exchange blocks."""
        return self._options.kv_signature

    def open(self, ref: WorkerRef) -> None:
        """Make the block pool readable as this process's and start the transfer threads.

        Raises:
            TransferError: no transport works here.
        """
        self._loop = asyncio.get_running_loop()
        self._choices.clear()
        self._transports = {transport.name: transport for transport in self._options.make()}
        signature = self._options.kv_signature
        self._descriptors = {
            name: transport.register(self._kv_cache, *ref, signature) for name, transport in self._transports.items()
        }
        self._puller = Puller(
            self._transports,
            self._kv_cache,
            num_threads=self._options.num_threads,
            faults=self._options.faults,
            limits=QuarantineLimits(max_age_s=self._options.quarantine_s),
            on_descriptor=lambda descriptor: self._on_loop(self._replace_descriptor, descriptor),
        )
        self._puller.start()

    async def reopen(self, ref: WorkerRef) -> None:
        """Tear down and start anew: nothing of the old generation writes or is read any more."""
        await self.close()
        self.open(ref)

    async def close(self) -> None:
        """Let READs end for a short while, then tear everything down."""
        if self._puller is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._puller.close)

    def announced(self) -> list[bytes]:
        """Our descriptors for the registration, preferred first."""
        return [encode_descriptor(descriptor) for descriptor in self._descriptors.values()]

    @property
    def problem(self) -> str | None:
        """Why transfers cannot be trusted now; None when they work."""
        if self._puller is None or not self._descriptors:
            return "no transport is open"
        num_failures = self._puller.num_failures_in_a_row
        if num_failures > MAX_FAILURES_IN_A_ROW and self._puller.failed_peers():  # marks fade: then it may try again
            return f"the last {num_failures} KV transfers failed"
        return None

    @property
    def num_pulls(self) -> int:
        """Requests to READ that have not ended."""
        return self._num_pulls

    # --- reading

    def find(self, registration: WorkerRegistration) -> Descriptor:
        """How a hand-off READs from this worker.

        Raises:
            TransferError: there is no common transport, or a descriptor is damaged.
        """
        if self._options.faults is not None and self._options.faults.should_fail("lookup"):
            raise TransferError(TransferReason.LOOKUP, "a test hook made it fail")
        return self._choose(registration)

    def _choose(self, registration: WorkerRegistration) -> Descriptor:
        """The log says which transport each pair uses, and why."""
        theirs = [decode_descriptor(payload) for payload in registration.descriptors]
        choice = choose_backend(self._options.setting, list(self._descriptors.values()), theirs)
        descriptor = next(descriptor for descriptor in theirs if descriptor.backend == choice.backend)
        if self._choices.get(descriptor.peer) != choice.backend:
            self._choices[descriptor.peer] = choice.backend
            log = logger.warning if choice.is_hazardous else logger.info
            log("reading from %s over %s: %s", descriptor.peer, choice.backend, choice.why)
        return descriptor

    def prepare(self, registration: WorkerRegistration) -> None:
        """Connect before the first hand-off needs it; what fails now fails again, and is told, at a hand-off."""
        if registration.ref in self._choices or self._puller is None:
            return
        try:
            descriptor = self._choose(registration)
        except TransferError as error:
            logger.warning("cannot read from %s: %s", registration.worker_id, error)
        else:
            self._puller.prepare(descriptor)

    def pull(
        self,
        descriptor: Descriptor,
        nonce: Nonce,
        blocks: tuple[list[int], list[int], list[bytes]],
        *,
        on_end: OnPull,
        on_terminal: OnPull,
    ) -> int:
        """READ and verify blocks (remote ids, local ids, digests); the callbacks run on the event loop."""
        assert self._puller is not None

        def ended(outcome: PullOutcome) -> None:
            self._num_pulls -= 1
            on_end(outcome)

        self._num_pulls += 1
        remote_ids, local_ids, digests = blocks
        request = PullRequest(
            descriptor=descriptor,
            nonce=nonce,
            remote_ids=remote_ids,
            local_ids=local_ids,
            digests=digests if self._options.verifies else [],
            deadline_s=time.monotonic() + self._options.read_timeout_s,
            on_end=lambda outcome: self._on_loop(ended, outcome),
            on_terminal=lambda outcome: self._on_loop(on_terminal, outcome),
        )
        return self._puller.submit(request)

    def abort(self, ticket: int) -> None:
        """Give a READ up; its end is told as ever."""
        assert self._puller is not None
        self._puller.abort(Ticket(ticket))

    # --- being read from

    def expect(self, nonce: Nonce, block_ids: list[int]) -> None:
        """A hand-off with this nonce may read these blocks too."""
        for transport in self._transports.values():
            transport.expect(nonce, block_ids)

    def forget(self, nonce: Nonce) -> None:
        """The hand-off is over."""
        for transport in self._transports.values():
            transport.forget(nonce)

    def set_serving(self, is_serving: bool) -> None:
        """Whether KV leases exist, so that peers may READ at any moment."""
        if self._puller is not None:
            self._puller.set_serving(is_serving)

    # --- inner workings

    def _replace_descriptor(self, descriptor: Descriptor) -> None:
        self._descriptors[descriptor.backend] = descriptor

    def _on_loop(self, callback: Callable[[T], None], value: T) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)
