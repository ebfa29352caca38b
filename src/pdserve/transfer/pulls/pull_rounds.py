"""What a transfer thread does in each round. One thread, no waiting; `transfer_thread.py` is the thread.

A round: post READs (bounded in size and in number per peer, round robin over requests), collect ended ones and have
their blocks compared with the announced digests, look after the quarantine. Nothing here waits for a peer, so one that
is frozen holds up no other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from pdserve.errors import TransferError
from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor, Handle, PullResult, PullState
from pdserve.transfer.pulls.active_pull import ActivePull
from pdserve.transfer.pulls.fenced_transport import FencedTransport
from pdserve.transfer.pulls.pull import OnOutcome, PullFaults, PullRequest, Ticket, fail_if_asked
from pdserve.transfer.pulls.verifier import Verifier

_MAX_READS_PER_PEER = 2
"""READs of one thread from one peer that are on their way at the same time."""
_DRAIN_POLL_S = 0.0005
_LOOK_AFTER_S = 0.005
"""At most, between looks at everything but READs while one follows the other: each look delays the next one."""

_log = logging.getLogger(__name__)


class PullRounds:
    """Active requests of one transfer thread, or its parts of them, and how they move on.

    Args:
        transports: the thread's own, one per backend.
        verifier: compares blocks with digests.
        drain_s: how long READs on their way may take to end when the thread stops.
        faults: test hooks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transports: Iterable[FencedTransport],
        verifier: Verifier,
        *,
        drain_s: float,
        faults: PullFaults | None,
        clock: Callable[[], float],
    ) -> None:
        self._fenced = {fenced.transport.name: fenced for fenced in transports}
        self._verifier = verifier
        self._drain_s, self._faults, self._clock = drain_s, faults, clock
        self._pulls: dict[Ticket, ActivePull] = {}
        self._preparing: dict[WorkerRef, str] = {}
        """Backends by peers whose connection is awaited before a request needs it."""
        self._look_after_at_s = self._post_until_s = 0.0

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
        """Blocks held back by READs that were given up, over all backends."""
        return sum(fenced.quarantine.num_blocks for fenced in self._fenced.values())

    @property
    def is_broken(self) -> bool:
        """Whether an agent could not be recreated."""
        return any(fenced.is_broken for fenced in self._fenced.values())

    def round(self) -> bool:
        """Whether something moved, so that another round is worth while at once."""
        self._post_until_s = self._clock() + _LOOK_AFTER_S
        num_posted = sum(self._advance(ticket) for ticket in list(self._pulls))
        num_results = self._collect()
        if self._verifier.is_aside:
            num_results += self._take_verdicts()
        if not num_posted or self._clock() >= self._look_after_at_s:
            self._look_after_everything_else()
        return num_results + num_posted > 0

    def _look_after_everything_else(self) -> None:
        """What has time while READs follow each other."""
        self._look_after_at_s = self._clock() + _LOOK_AFTER_S
        self._watch_preparing()
        for name, fenced in self._fenced.items():
            fenced.look_after(self._pulls_of(name))
            fenced.transport.serve()

    # --- connections

    def prepare(self, descriptor: Descriptor) -> None:
        """Connect to a peer before a request needs it. A failure costs nothing: the request tries again."""
        fenced = self._fenced.get(descriptor.backend)
        if fenced is None:
            return
        try:
            fenced.transport.start_connect(descriptor)
            self._preparing[descriptor.peer] = descriptor.backend
        except TransferError as error:
            _log.warning("cannot connect to %s: %s", descriptor.peer, error)

    def disconnect(self, peer: WorkerRef) -> None:
        """Drop a peer; requests to it end with reason disconnected."""
        for pull in list(self._pulls.values()):
            if pull.peer == peer:
                self._fail(pull, TransferReason.DISCONNECTED, f"{peer} was dropped")
        for fenced in self._fenced.values():
            fenced.transport.disconnect(peer)

    def _watch_preparing(self) -> None:
        for peer, name in list(self._preparing.items()):
            try:
                is_over = self._fenced[name].transport.is_connected(peer)
            except TransferError as error:
                _log.info("cannot connect to %s ahead of time: %s", peer, error)
                is_over = True
            if is_over:
                del self._preparing[peer]

    # --- READs begin

    def begin(
        self, ticket: Ticket, request: PullRequest, reads: deque[range], on_end: OnOutcome, on_terminal: OnOutcome
    ) -> None:
        """Take a request on, or a part of it.

        Args:
            reads: see `split_into_reads`; other threads may take from them, too.
            on_end, on_terminal: called instead of the request's own.
        """
        now_s = self._clock()
        not_before_s = now_s + (self._faults.delay_s("pull_delay_s") if self._faults else 0.0)
        backend, peer = request.descriptor.backend, request.descriptor.peer
        pull = ActivePull(ticket, request, peer, now_s, not_before_s, reads, on_end, on_terminal)
        self._pulls[ticket] = pull
        if backend not in self._fenced:
            self._fail(pull, TransferReason.LOOKUP, f"backend {backend} is not usable on this worker")

    def _advance(self, ticket: Ticket) -> int:
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
        fenced = self._fenced[request.descriptor.backend]
        if fenced.is_draining:
            return 0
        if not pull.is_connecting:
            fail_if_asked(self._faults, TransferReason.CONNECT)
            fenced.transport.start_connect(request.descriptor)
            pull.is_connecting = True
        if not fenced.transport.is_connected(pull.peer):
            return 0
        pull.first_read_s = pull.first_read_s or now_s
        return self._post(pull, fenced)

    def _post(self, pull: ActivePull, fenced: FencedTransport) -> int:
        """Post READs; of a lone request all that are copied at once, for some milliseconds.

        Copying drives code out of the processor's caches, so that whatever runs between two READs is slow.
        """
        request, num_posted = pull.request, 0
        while self._num_in_flight(pull.peer) < _MAX_READS_PER_PEER:
            try:
                indices = pull.waiting.popleft()
            except IndexError:  # another thread took the last one
                break
            fail_if_asked(self._faults, TransferReason.POST)
            remote_ids, local_ids = pull.remote_ids(indices), pull.local_ids(indices)
            handle = fenced.transport.pull(pull.peer, request.nonce, remote_ids, local_ids, request.deadline_s)
            pull.in_flight[handle] = indices
            num_posted += 1
            self._collect_from(fenced)
            if pull.outcome is not None or len(self._pulls) > 1 or self._clock() >= self._post_until_s:
                break
        return num_posted

    def _num_in_flight(self, peer: WorkerRef) -> int:
        return sum(len(pull.in_flight) for pull in self._pulls.values() if pull.peer == peer)

    # --- READs end

    def _collect(self) -> int:
        """Take the ended READs of all transports; returns their number."""
        return sum(self._collect_from(fenced) for fenced in self._fenced.values())

    def _collect_from(self, fenced: FencedTransport) -> int:
        results = fenced.transport.poll()
        for result in results:
            self._take_result(fenced, result)
        return len(results)

    def _take_result(self, fenced: FencedTransport, result: PullResult) -> None:
        if result.handle in fenced.quarantine:
            if result.is_terminal:
                fenced.quarantine.remove(result.handle).tell_if_terminal()
            return
        pull = self._pull_of(fenced.transport.name, result.handle)
        if pull is None:
            return
        indices = pull.in_flight.pop(result.handle)
        if result.state is PullState.FAILED:
            if not result.is_terminal:
                fenced.quarantine.add(result.handle, pull, len(indices))
            self._fail(pull, result.reason or TransferReason.OTHER, result.detail)
            return
        self._accept(pull, indices, lambda: self._verifier.count_wrong(pull, indices))

    def _pulls_of(self, name: str) -> list[ActivePull]:
        return [pull for pull in self._pulls.values() if pull.request.descriptor.backend == name]

    def _pull_of(self, name: str, handle: Handle) -> ActivePull | None:
        for pull in self._pulls.values():
            if handle in pull.in_flight and pull.request.descriptor.backend == name:
                return pull
        return None

    def _take_verdicts(self) -> int:
        """Act on what was found out aside; returns the number of READs that it was about."""
        done = [(pull, entry) for pull in self._pulls.values() for entry in pull.verifying if entry[0].done()]
        for pull, (verdict, indices) in done:
            pull.verifying.remove((verdict, indices))
            if pull.outcome is None:
                self._accept(pull, indices, verdict.result)
        return len(done)

    def _accept(self, pull: ActivePull, indices: range, count_wrong: Callable[[], int | None]) -> None:
        """Take blocks whose comparison finds no difference; the last ones end the request.

        Whatever goes wrong with the comparison, a device included: these blocks are not verified.
        """
        try:
            num_wrong = count_wrong()
        except TransferError as error:
            self._fail(pull, error.reason, str(error))
        except Exception as error:
            _log.exception("blocks cannot be verified")
            self._fail(pull, TransferReason.VERIFY, f"{type(error).__name__}: {error}")
        else:
            if num_wrong:
                found = f"{num_wrong} of {len(indices)} blocks differ from what {pull.peer} announced"
                self._fail(pull, TransferReason.VERIFY, found)
            elif num_wrong == 0:
                pull.num_bytes += len(indices) * self._verifier.block_bytes
                self._end_if_done(pull)

    # --- requests end

    def _end_if_done(self, pull: ActivePull) -> None:
        if pull.outcome is not None or not pull.is_done:
            return
        if self._faults and self._faults.should_fail(TransferReason.NOTIFY):
            self._fail(pull, TransferReason.NOTIFY, "a test hook made it fail")
        else:
            self._end(pull, None, "")

    def _fail(self, pull: ActivePull, reason: TransferReason, detail: str) -> None:
        """End a request. Its READs on their way are given up, and quarantined where that is no fence."""
        fenced = self._fenced.get(pull.request.descriptor.backend)
        if fenced is not None:
            fenced.give_up(pull)
        pull.waiting.clear()
        self._end(pull, reason, detail)

    def _end(self, pull: ActivePull, reason: TransferReason | None, detail: str) -> None:
        del self._pulls[pull.ticket]
        pull.end(reason, detail, self._clock())

    def abort(self, ticket: Ticket) -> None:
        """End a request with reason aborted; one that has ended: nothing."""
        pull = self._pulls.get(ticket)
        if pull is not None:
            self._fail(pull, TransferReason.ABORTED, "")

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
        for fenced in self._fenced.values():
            fenced.close()
