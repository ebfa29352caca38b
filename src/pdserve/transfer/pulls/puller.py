"""Step 6 of a request: the transfer threads. They READ announced blocks into this worker's own and verify them.

Before it: the prefill worker announced complete, leased blocks (KvReady). After it: the decode worker's engine
gets them, and the prefill worker a KvRelease. On a prefill worker the first thread answers peers (`serve`).

Where the thread that posts a READ also copies it (shared memory), two threads share each request, READ by READ, and
verify what they just copied while it is in their core's cache. Each has transports of its own and touches no other's;
what it does is in `transfer_thread.py` and `pull_rounds.py`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor, Transport
from pdserve.transfer.memory import bytes_view
from pdserve.transfer.pulls.fenced_transport import FencedTransport
from pdserve.transfer.pulls.peer_failures import FAILURE_TTL_S, PeerFailures
from pdserve.transfer.pulls.pull import (
    MAX_READ_BYTES,
    SHARED_READ_BYTES,
    PullFaults,
    PullOutcome,
    PullRequest,
    Ticket,
    split_into_reads,
)
from pdserve.transfer.pulls.pull_rounds import PullRounds
from pdserve.transfer.pulls.quarantine import DEFAULT_LIMITS, Quarantine, QuarantineLimits
from pdserve.transfer.pulls.shared_pull import SharedPull
from pdserve.transfer.pulls.transfer_thread import TransferThread
from pdserve.transfer.pulls.verifier import Verifier

_log = logging.getLogger(__name__)


class Puller:
    """The transfer threads of one worker.

    Every submitted request ends with exactly one `on_end`; one whose outcome is not terminal gets exactly one
    `on_terminal` later. `close` ends all of them.

    Args:
        transports: registered ones, by name.
        kv_cache: `[num_blocks, …]`, the tensor they were registered with.
        num_threads: more than one help where a transport has `another_reader`; a worker that only serves needs one.
        limits: how long READs that were given up are waited for.
        max_read_bytes: size of one READ at most; None: what is best for its threads.
        faults: test hooks.
        on_descriptor: called in the first transfer thread when a descriptor changed: announce it.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        kv_cache: torch.Tensor,
        *,
        num_threads: int = 2,
        limits: QuarantineLimits = DEFAULT_LIMITS,
        max_read_bytes: int | None = None,
        faults: PullFaults | None = None,
        on_descriptor: Callable[[Descriptor], None] = lambda descriptor: None,
    ) -> None:
        clock = time.monotonic
        self._block_bytes, self._max_read_bytes = bytes_view(kv_cache).shape[1], max_read_bytes
        self._failures = PeerFailures(FAILURE_TTL_S, clock)
        self._aside = None if kv_cache.device.type == "cpu" else ThreadPoolExecutor(1, "kv-verify")
        verifier = Verifier(kv_cache, aside=self._aside, faults=faults)
        of_threads = [transports, *_further_readers(transports, num_threads - 1)]
        max_blocks = limits.max_ratio * kv_cache.shape[0] / len(of_threads)

        def rounds_over(readers: Mapping[str, Transport]) -> PullRounds:
            fenced = [
                FencedTransport(
                    transport,
                    Quarantine(limits.max_age_s, max_blocks, clock),
                    drain_s=limits.drain_s,
                    on_descriptor=on_descriptor if readers is transports else _ignore,
                    clock=clock,
                )
                for transport in readers.values()
            ]
            return PullRounds(fenced, verifier, drain_s=limits.drain_s, faults=faults, clock=clock)

        self._rounds = [rounds_over(readers) for readers in of_threads]
        self._threads = [TransferThread(f"kv-transfer-{n}", rounds) for n, rounds in enumerate(self._rounds)]
        self._backends = [frozenset(readers) for readers in of_threads]
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closing = False

    def start(self) -> None:
        """Start the transfer threads; requests submitted before wait for it."""
        for thread in self._threads:
            thread.start()

    def prepare(self, descriptor: Descriptor) -> None:
        """Connect to a peer before its first request: the first READ from a peer is slow."""
        self._command(lambda rounds: rounds.prepare(descriptor))

    def submit(self, request: PullRequest) -> Ticket:
        """Fetch blocks; returns a ticket for `abort`.

        Raises:
            TransferError: reason aborted: the puller is closed.
        """
        ticket = Ticket(next(self._tickets))
        readers = self._readers(request.descriptor.backend)
        num_blocks, num_readers = len(request.local_ids), len(readers)
        max_read_bytes = self._max_read_bytes or (SHARED_READ_BYTES if num_readers > 1 else MAX_READ_BYTES)
        reads = split_into_reads(num_blocks, self._block_bytes, max_read_bytes, num_threads=num_readers)
        num_parts = min(num_readers, len(reads))
        shared = SharedPull(request, num_parts, self._stop, self._note_end)

        def begin(rounds: PullRounds) -> None:
            rounds.begin(ticket, request, reads, shared.on_end, shared.on_terminal)

        with self._lock:
            self._refuse_if_closing()
            for part in range(num_parts):
                readers[(ticket + part) % num_readers].command(begin)
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End a request with reason aborted, unless it has ended."""
        self._command(lambda rounds: rounds.abort(ticket))

    def disconnect(self, peer: WorkerRef) -> None:
        """Drop a peer that is gone; requests to it end with reason disconnected."""
        self._command(lambda rounds: rounds.disconnect(peer))

    def set_serving(self, is_serving: bool) -> None:
        """Whether leases exist, so that peers may READ from this worker at any moment."""
        self._threads[0].set_serving(is_serving)

    def failed_peers(self) -> frozenset[WorkerRef]:
        """Peers whose last transfer failed a short while ago."""
        return self._failures.peers()

    @property
    def num_failures_in_a_row(self) -> int:
        """Failed requests since the last one that worked, over all peers."""
        return self._failures.num_in_a_row

    def close(self) -> None:
        """Let READs on their way end for a short while, then tear everything down: a fence. Again: nothing."""
        with self._lock:
            self._is_closing = True
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join()
        if self._aside is not None:
            self._aside.shutdown()

    def _readers(self, backend: str) -> list[TransferThread]:
        """Threads that share a request; one whose agent could not be recreated has no part where another works."""
        able = [n for n, backends in enumerate(self._backends) if backend in backends]
        whole = [n for n in able if not self._rounds[n].is_broken]
        return [self._threads[n] for n in whole or able or [0]]

    def _command(self, command: Callable[[PullRounds], None]) -> None:
        with self._lock:
            self._refuse_if_closing()
            self._tell_all(command)

    def _refuse_if_closing(self) -> None:
        if self._is_closing:
            raise TransferError(TransferReason.ABORTED, "the transfer threads are closed")

    def _tell_all(self, command: Callable[[PullRounds], None]) -> None:
        for thread in self._threads:
            thread.command(command)

    def _stop(self, ticket: Ticket) -> None:
        if self._is_closing:
            return  # each thread lets its own READs end
        self._tell_all(lambda rounds: rounds.abort(ticket))

    def _note_end(self, request: PullRequest, outcome: PullOutcome) -> None:
        if outcome.reason is None:
            self._failures.note_success(request.descriptor.peer)
        else:
            self._failures.note_failure(request.descriptor.peer, outcome.reason)


def _further_readers(transports: Mapping[str, Transport], num_threads: int) -> list[dict[str, Transport]]:
    """Transports of the threads after the first; fewer threads where none has another reader."""
    of_threads = []
    for _ in range(num_threads):
        readers = {}
        for name, transport in transports.items():
            try:
                reader = transport.another_reader()
            except TransferError as error:
                _log.warning("transport %s reads with one thread less: %s", name, error)
                continue
            if reader is not None:
                readers[name] = reader
        if readers:
            of_threads.append(readers)
    return of_threads


def _ignore(descriptor: Descriptor) -> None:
    pass
