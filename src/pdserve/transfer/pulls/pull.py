"""A request to fetch blocks from one peer, its outcome, and how it is cut into READs. Data alone."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, Protocol

import msgspec

from pdserve.errors import TransferError
from pdserve.ids import Nonce
from pdserve.reasons import TransferReason
from pdserve.transfer.base import Descriptor

MAX_READ_BYTES = 8 << 20
"""Size of one READ: it ends soon, so that little is quarantined for short when it is given up."""
SHARED_READ_BYTES = 4 << 20
"""Size of one READ where threads share a request: large beside what each costs in Python, and mostly still in caches
when its own thread verifies it."""


Ticket = NewType("Ticket", int)
"""Names one request of one worker, as `Puller.submit` returns it; never a transport's `Handle` of one READ."""


class PullFaults(Protocol):
    """Test hooks that the transfer threads ask for (`pdserve.faults.Faults`)."""

    def delay_s(self, name: str) -> float:
        """Wait before the first READ."""
        ...

    def should_fail(self, stage: str) -> bool:
        """Whether connect, post, copy, verify or notify fails now."""
        ...

    def take(self, name: str) -> bool:
        """Whether to corrupt_block now."""
        ...


def fail_if_asked(faults: PullFaults | None, stage: TransferReason) -> None:
    """Let a test hook fail a stage.

    Raises:
        TransferError: it is to fail now.
    """
    if faults is not None and faults.should_fail(stage):
        raise TransferError(stage, "a test hook made it fail")


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a request ended. Blocks hold verified content only if `ok`."""

    ticket: Ticket
    reason: TransferReason | None = None
    """Why it failed; None: it did not."""
    detail: str = ""
    """The failure in words, for the log."""
    num_bytes: int = 0
    """Bytes that were READ and verified."""
    duration_s: float = 0.0
    """Time between the first READ posted (or the submission, if none was) and the end."""
    is_terminal: bool = True
    """False: the local blocks must stay quarantined until `on_terminal` is called."""

    @property
    def ok(self) -> bool:
        """Whether all blocks are here and verified."""
        return self.reason is None


OnOutcome = Callable[[PullOutcome], None]


def _ignore(outcome: PullOutcome) -> None:
    pass


class PullRequest(msgspec.Struct, frozen=True):
    """Blocks to READ from one peer. Callbacks run in a transfer thread and must not block."""

    descriptor: Descriptor
    """The peer's, of the backend chosen for the pair."""
    nonce: Nonce
    remote_ids: list[int]
    local_ids: list[int]
    digests: list[bytes]
    """Announced digests, 16 bytes per block; none: nothing is verified."""
    deadline_s: float
    """When the request fails with reason timeout, on the monotonic clock."""
    on_end: OnOutcome
    """Called exactly once, at the end."""
    on_terminal: OnOutcome = _ignore
    """Called exactly once more if the outcome was not terminal."""

    def __post_init__(self) -> None:
        assert len(self.remote_ids) == len(self.local_ids) > 0, (self.remote_ids, self.local_ids)
        assert len(self.digests) in (0, len(self.local_ids)), (len(self.digests), len(self.local_ids))


def split_into_reads(
    num_blocks: int, block_bytes: int, max_read_bytes: int = MAX_READ_BYTES, *, num_threads: int = 1
) -> deque[range]:
    """Index ranges of READs of at most `max_read_bytes` each, and of at least one block.

    As few and as equal as they can be, and as many for each of the threads that share them; longer ones come first,
    since a thread that starts sooner takes them.
    """
    num_reads = -(-num_blocks // max(1, max_read_bytes // block_bytes))
    if num_reads > 1:
        num_reads = min(num_blocks, -(-num_reads // num_threads) * num_threads)
    borders = [-(-num_blocks * number // num_reads) for number in range(num_reads + 1)]
    return deque(range(first, stop) for first, stop in itertools.pairwise(borders))
