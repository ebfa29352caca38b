"""A request to READ blocks while it is under way in one transfer thread: its state, and how its end is told."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from pdserve.reasons import TransferReason
from pdserve.registration import WorkerRef
from pdserve.transfer.base import Handle
from pdserve.transfer.pulls.pull import OnOutcome, PullOutcome, PullRequest, Ticket

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ActivePull:
    """A request that has not ended, or one thread's part of it. Touched by that thread alone."""

    ticket: Ticket
    request: PullRequest
    peer: WorkerRef
    submitted_s: float
    not_before_s: float
    """A test hook delays the first READ until then."""
    waiting: deque[range]
    """READs not posted yet, as index ranges into the request's lists; shared with other threads' parts of it."""
    on_end: OnOutcome
    """Called instead of the request's own, with the outcome of this part."""
    on_terminal: OnOutcome
    """Called instead of the request's own, with the outcome of this part."""
    in_flight: dict[Handle, range] = field(default_factory=dict)
    """READs that were posted and have not ended, by the transport's handle."""
    verifying: list[tuple[Future[int], range]] = field(default_factory=list)
    """READs that ended and whose blocks are being compared with their digests aside."""
    is_connecting: bool = False
    first_read_s: float | None = None
    num_bytes: int = 0
    """Bytes that were READ and verified."""
    num_unended_reads: int = 0
    """READs that were given up and are not terminal."""
    outcome: PullOutcome | None = None
    """How this part ended; None until then."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to READ or to verify: all is here, or a matter of another thread's part."""
        return not self.waiting and not self.in_flight and not self.verifying

    def local_ids(self, indices: range) -> list[int]:
        """Our blocks of one READ."""
        return self.request.local_ids[indices.start : indices.stop]

    def remote_ids(self, indices: range) -> list[int]:
        """The peer's blocks of one READ."""
        return self.request.remote_ids[indices.start : indices.stop]

    def digests(self, indices: range) -> list[bytes]:
        """The announced digests of one READ's blocks; empty where they are not to be verified."""
        return self.request.digests[indices.start : indices.stop]

    def end(self, reason: TransferReason | None, detail: str, now_s: float) -> None:
        """Remember and tell the outcome; reason None: everything is here and verified."""
        started_s = self.submitted_s if self.first_read_s is None else self.first_read_s
        self.outcome = PullOutcome(
            ticket=self.ticket,
            reason=reason,
            detail=detail,
            num_bytes=self.num_bytes,
            duration_s=now_s - started_s,
            is_terminal=self.num_unended_reads == 0,
        )
        _call(self.on_end, self.outcome)

    def tell_if_terminal(self) -> None:
        """After a given-up READ became terminal: if it was the last one of an ended request, say so."""
        if self.num_unended_reads == 0 and self.outcome is not None:
            _call(self.on_terminal, self.outcome)


def _call(callback: OnOutcome, outcome: PullOutcome) -> None:
    try:
        callback(outcome)
    except Exception:
        _log.exception("a callback of the transfer thread failed on %s", outcome)
