"""What a transfer thread does in each round. One thread, no waiting; `transfer_thread.py` is the thread.

A round: post READs (bounded in size and in number per peer, round robin over requests), collect ended ones and compare
their blocks with the announced digests, look after the quarantine. Nothing here waits for a peer, so one that is
frozen holds up nobody else.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial

import torch

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor, PullResult, PullState, Transport
from pdserve.transfer.digest import wrong_block_counter
from pdserve.transfer.memory import bytes_view
from pdserve.transfer.pulls.pull import ActivePull, OnOutcome, PullFaults, PullOutcome, PullRequest
from pdserve.transfer.pulls.quarantine import Quarantine

_DRAIN_POLL_S = 0.0005
_LOOK_AFTER_S = 0.005
"""At most, between looks at everything but READs while one follows the other: each look delays the next one."""

_log = logging.getLogger(__name__)


class PullRounds:
    """Active requests of one transfer thread, or its parts of them, and how they move on. Arguments: see `Puller`."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        kv_cache: torch.Tensor,
        *,
        faults: PullFaults | None,
        quarantine_s: float,
        max_quarantined_ratio: float,
        max_reads_per_peer: int,
        drain_s: float,
        on_descriptor: Callable[[Descriptor], None],
        clock: Callable[[], float],
        verify_aside: Executor | None = None,
    ) -> None:
        self._transports = dict(transports)
        self._kv_cache = kv_cache
        self._block_bytes = bytes_view(kv_cache).shape[1]
        self._faults = faults
        self._max_reads_per_peer = max_reads_per_peer
        self._count_wrong_blocks = wrong_block_counter(kv_cache)
        self._verify_aside = verify_aside
        self._drain_s = drain_s
        self._on_descriptor = on_descriptor
        self._clock = clock
        max_blocks = max_quarantined_ratio * kv_cache.shape[0]
        self._quarantines = {name: Quarantine(quarantine_s, max_blocks, clock) for name in transports}
        self._draining_since_s: dict[str, float] = {}
        self._pulls: dict[int, ActivePull] = {}
        self._preparing: dict[WorkerRef, str] = {}
        self._look_after_at_s = self._post_until_s = 0.0
        self.num_recreated = 0
        self.is_broken = False
        """An agent could not be recreated."""

    @property
    def has_pulls(self) -> bool:
        """Whether requests are active."""
        return bool(self._pulls)

    @property
    def is_preparing(self) -> bool:
        """Whether a connection is awaited that no request needs yet."""
        return bool(self._preparing)

    @property
    def num_quarantined_blocks(self) -> int:
        """Over all backends."""
        return sum(quarantine.num_blocks for quarantine in self._quarantines.values())

    def round(self) -> bool:
        """Whether something moved, so that another round is worth while at once."""
        self._post_until_s = self._clock() + _LOOK_AFTER_S
        num_posted = sum(self._advance(ticket) for ticket in list(self._pulls))
        num_results = self._collect()
        if self._verify_aside is not None:
            num_results += self._take_verdicts()
        if not num_posted or self._clock() >= self._look_after_at_s:
            self._look_after_everything_else()
        return num_results + num_posted > 0

    def _look_after_everything_else(self) -> None:
        """What has time while READs follow each other."""
        self._look_after_at_s = self._clock() + _LOOK_AFTER_S
        self._watch_preparing()
        for name, transport in self._transports.items():
            self._look_after_quarantine(name, transport)
            transport.serve()

    def begin(
        self, ticket: int, request: PullRequest, reads: deque[range], on_end: OnOutcome, on_terminal: OnOutcome
    ) -> None:
        """Take a request on, or a part of it.

        Args:
            reads: see `split_into_reads`; other threads may take from them, too.
            on_end, on_terminal: called instead of the request's own.
        """
        now_s = self._clock()
        not_before_s = now_s + (self._faults.delay_s("pull_delay_s") if self._faults else 0.0)
        peer = request.descriptor.peer
        pull = ActivePull(ticket, request, peer, now_s, not_before_s, reads, on_end, on_terminal)
        self._pulls[ticket] = pull
        if request.descriptor.backend not in self._transports:
            self._fail(
                pull, TransferReason.LOOKUP, f"backend {request.descriptor.backend} is not usable on this worker"
            )

    def prepare(self, descriptor: Descriptor) -> None:
        """Connect to a peer before a request needs it. A failure costs nothing: the request tries again."""
        transport = self._transports.get(descriptor.backend)
        if transport is None:
            return
        try:
            transport.start_connect(descriptor)
            self._preparing[descriptor.peer] = descriptor.backend
        except TransferError as error:
            _log.warning("cannot connect to %s: %s", descriptor.peer, error)

    def _watch_preparing(self) -> None:
        for peer, name in list(self._preparing.items()):
            try:
                is_over = self._transports[name].is_connected(peer)
            except TransferError as error:
                _log.info("cannot connect to %s ahead of time: %s", peer, error)
                is_over = True
            if is_over:
                del self._preparing[peer]

    def _advance(self, ticket: int) -> int:
        """Move a request on, by at most one READ where there are others; returns how many were posted."""
        pull = self._pulls.get(ticket)
        if pull is None:
            return 0  # it ended by what the one before it found out
        num_posted = 0
        try:
            if not pull.is_done:
                num_posted = self._connect_and_post(pull)
            self._end_if_done(pull)
        except TransferError as error:
            self._fail(pull, error.reason, str(error))
        except Exception as error:
            _log.exception("transport %s failed", pull.request.descriptor.backend)
            self._fail(pull, TransferReason.POST, f"{type(error).__name__}: {error}")
        return num_posted

    def _connect_and_post(self, pull: ActivePull) -> int:
        now_s, request = self._clock(), pull.request
        if now_s >= request.deadline_s:
            raise TransferError(TransferReason.TIMEOUT, "the time for this READ is over")
        if now_s < pull.not_before_s or not pull.waiting:
            return 0
        name = request.descriptor.backend
        if name in self._draining_since_s:
            return 0
        transport = self._transports[name]
        if not pull.is_connecting:
            self._maybe_fail(TransferReason.CONNECT)
            transport.start_connect(request.descriptor)
            pull.is_connecting = True
        if not transport.is_connected(pull.peer):
            return 0
        pull.first_read_s = pull.first_read_s or now_s
        return self._post(pull, name, transport)

    def _post(self, pull: ActivePull, name: str, transport: Transport) -> int:
        """Post READs; of a lone request all that are copied at once, for some milliseconds.

        Copying drives code out of the processor's caches, so that whatever runs between two READs is slow.
        """
        request, num_posted = pull.request, 0
        while self._num_in_flight(pull.peer) < self._max_reads_per_peer:
            try:
                indices = pull.waiting.popleft()
            except IndexError:  # another thread took the last one
                break
            self._maybe_fail(TransferReason.POST)
            remote_ids, local_ids = request.remote_ids[indices.start : indices.stop], _local_ids(request, indices)
            handle = transport.pull(pull.peer, request.nonce, remote_ids, local_ids, request.deadline_s)
            pull.in_flight[handle] = indices
            num_posted += 1
            self._collect_from(name, transport)
            if pull.outcome is not None or len(self._pulls) > 1 or self._clock() >= self._post_until_s:
                break
        return num_posted

    def _num_in_flight(self, peer: WorkerRef) -> int:
        return sum(len(pull.in_flight) for pull in self._pulls.values() if pull.peer == peer)

    def _collect(self) -> int:
        """Take the ended READs of all transports; returns their number."""
        return sum(self._collect_from(name, transport) for name, transport in self._transports.items())

    def _collect_from(self, name: str, transport: Transport) -> int:
        results = transport.poll()
        for result in results:
            self._take_result(name, result)
        return len(results)

    def _take_result(self, name: str, result: PullResult) -> None:
        quarantine = self._quarantines[name]
        if result.handle in quarantine:
            if result.is_terminal:
                self._report_if_terminal(quarantine.remove(result.handle))
            return
        pull = self._pull_of(name, result.handle)
        if pull is None:
            return
        indices = pull.in_flight.pop(result.handle)
        if result.state is PullState.FAILED:
            if not result.is_terminal:
                quarantine.add(result.handle, pull, len(indices))
            self._fail(pull, result.reason or TransferReason.OTHER, result.detail)
            return
        self._settle(pull, lambda: self._verify(pull, indices))

    def _settle(self, pull: ActivePull, verify: Callable[[], None]) -> None:
        """Whatever goes wrong, a device included: these blocks are not verified."""
        try:
            verify()
        except TransferError as error:
            self._fail(pull, error.reason, str(error))
        except Exception as error:
            _log.exception("blocks cannot be verified")
            self._fail(pull, TransferReason.VERIFY, f"{type(error).__name__}: {error}")

    def _pull_of(self, name: str, handle: int) -> ActivePull | None:
        for pull in self._pulls.values():
            if handle in pull.in_flight and pull.request.descriptor.backend == name:
                return pull
        return None

    def _verify(self, pull: ActivePull, indices: range) -> None:
        """Compare received blocks with the announced digests, if there are any; on a device that goes on aside.

        Raises:
            TransferError: reason verify: they differ.
            Exception: they cannot be compared.
        """
        self._maybe_fail(TransferReason.COPY)
        local_ids = _local_ids(pull.request, indices)
        if self._faults and self._faults.take("corrupt_block"):
            bytes_view(self._kv_cache)[local_ids[0], 0] ^= 1
        self._maybe_fail(TransferReason.VERIFY)
        announced = pull.request.digests[indices.start : indices.stop]
        if not announced:
            self._accept(pull, indices, 0)
        elif self._verify_aside is None:
            self._accept(pull, indices, self._count_wrong_blocks(local_ids, announced))
        else:
            verdict = self._verify_aside.submit(self._count_wrong_blocks, local_ids, announced)
            pull.verifying.append((verdict, indices))

    def _take_verdicts(self) -> int:
        """Act on what was found out aside; returns the number of READs that it was about."""
        done = [(pull, entry) for pull in self._pulls.values() for entry in pull.verifying if entry[0].done()]
        for pull, entry in done:
            pull.verifying.remove(entry)
            if pull.outcome is None:
                self._settle(pull, partial(self._accept_verdict, pull, *entry))
        return len(done)

    def _accept_verdict(self, pull: ActivePull, verdict: Future[int], indices: range) -> None:
        self._accept(pull, indices, verdict.result())

    def _accept(self, pull: ActivePull, indices: range, num_wrong: int) -> None:
        """Blocks were compared; the last ones end the request."""
        if num_wrong:
            found = f"{num_wrong} of {len(indices)} blocks differ from what {pull.peer} announced"
            raise TransferError(TransferReason.VERIFY, found)
        pull.num_bytes += len(indices) * self._block_bytes
        self._end_if_done(pull)

    def _maybe_fail(self, stage: TransferReason) -> None:
        if self._faults and self._faults.should_fail(stage):
            raise TransferError(stage, "a test hook made it fail")

    # --- ends

    def _end_if_done(self, pull: ActivePull) -> None:
        if pull.outcome is not None or not pull.is_done:
            return
        if self._faults and self._faults.should_fail(TransferReason.NOTIFY):
            self._fail(pull, TransferReason.NOTIFY, "a test hook made it fail")
        else:
            self._report_end(pull, None, "")

    def _fail(self, pull: ActivePull, reason: TransferReason, detail: str) -> None:
        """End a request. Its READs on their way are given up, and quarantined where that is no fence."""
        name = pull.request.descriptor.backend
        for handle, indices in pull.in_flight.items():
            if not self._transports[name].abort(handle):
                self._quarantines[name].add(handle, pull, len(indices))
        pull.in_flight.clear()
        pull.waiting.clear()
        self._report_end(pull, reason, detail)

    def abort(self, ticket: int) -> None:
        """End a request with reason aborted; one that has ended: nothing."""
        pull = self._pulls.get(ticket)
        if pull is not None:
            self._fail(pull, TransferReason.ABORTED, "")

    def _report_end(self, pull: ActivePull, reason: TransferReason | None, detail: str) -> None:
        del self._pulls[pull.ticket]
        started_s = pull.submitted_s if pull.first_read_s is None else pull.first_read_s
        pull.outcome = PullOutcome(
            ticket=pull.ticket,
            ok=not reason,
            reason=reason,
            detail=detail,
            num_bytes=pull.num_bytes,
            duration_s=self._clock() - started_s,
            is_terminal=pull.num_unended_reads == 0,
        )
        _call(pull.on_end, pull.outcome)

    def _report_if_terminal(self, pull: ActivePull) -> None:
        if pull.num_unended_reads == 0 and pull.outcome is not None:
            _call(pull.on_terminal, pull.outcome)

    def disconnect(self, peer: WorkerRef) -> None:
        """Drop a peer; requests to it end with reason disconnected."""
        for pull in list(self._pulls.values()):
            if pull.peer == peer:
                self._fail(pull, TransferReason.DISCONNECTED, f"{peer} was dropped")
        for transport in self._transports.values():
            transport.disconnect(peer)

    # --- quarantine and teardown

    def _look_after_quarantine(self, name: str, transport: Transport) -> None:
        """When waiting has become too expensive: let other READs end, then recreate the agent."""
        quarantine, now_s = self._quarantines[name], self._clock()
        if not quarantine:
            self._draining_since_s.pop(name, None)
            return
        if quarantine.is_overdue:
            self._draining_since_s.setdefault(name, now_s)
        since_s = self._draining_since_s.get(name)
        if since_s is not None and (not self._has_in_flight(name) or now_s - since_s >= self._drain_s):
            self._recreate(name, transport)

    def _recreate(self, name: str, transport: Transport) -> None:
        """The fence: everything given up is terminal afterwards, and READs lost by it are posted again."""
        _log.warning("recreating the %s agent: %d blocks are quarantined", name, self._quarantines[name].num_blocks)
        try:
            self._on_descriptor(transport.recreate())
        except TransferError:
            self.is_broken = True
            _log.exception("the %s agent was destroyed, but a new one does not start; its transfers will fail", name)
        self.num_recreated += 1
        self._draining_since_s.pop(name, None)
        for pull in self._pulls.values():
            if pull.request.descriptor.backend == name:
                pull.waiting.extendleft(pull.in_flight.values())
                pull.in_flight.clear()
                pull.is_connecting = False
        for pull in self._quarantines[name].remove_all():
            self._report_if_terminal(pull)

    def _has_in_flight(self, name: str) -> bool:
        return any(pull.in_flight and pull.request.descriptor.backend == name for pull in self._pulls.values())

    def drain(self) -> None:
        """Fail what was not begun, and let READs on their way end: a reader that just goes may harm its peer."""
        for pull in list(self._pulls.values()):
            if not pull.in_flight and not pull.verifying:
                self._fail(pull, TransferReason.ABORTED, "this worker stops")
        until_s = self._clock() + self._drain_s
        while any(p.in_flight or p.verifying for p in self._pulls.values()) and self._clock() < until_s:
            self._collect()
            self._take_verdicts()
            time.sleep(_DRAIN_POLL_S)

    def tear_down(self) -> None:
        """End everything and close the transports: a fence."""
        for pull in list(self._pulls.values()):
            self._fail(pull, TransferReason.ABORTED, "this worker stops")
        for name, transport in self._transports.items():
            transport.close()
            for pull in self._quarantines[name].remove_all():
                self._report_if_terminal(pull)


def _local_ids(request: PullRequest, indices: range) -> list[int]:
    return request.local_ids[indices.start : indices.stop]


def _call(callback: OnOutcome, outcome: PullOutcome) -> None:
    try:
        callback(outcome)
    except Exception:
        _log.exception("a callback of the transfer thread failed on %s", outcome)
