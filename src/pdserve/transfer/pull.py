"""One request to fetch blocks from a peer, its outcome, and how far it is. Data only: `puller.py` moves it on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.transfer.base import Descriptor, PeerId

MAX_READ_BYTES = 8 << 20
"""Of one READ: it ends soon, so that little is quarantined for short when it is given up, and its bytes are still in
a processor's cache when they are verified."""
SHORT_TAIL_BYTES = 3 << 20
"""Verified at the end, while nothing is copied: less would be further READs, and each has a price of its own."""


class PullFaults(Protocol):
    """Test hooks that the transfer thread asks for (`pdserve.faults.Faults`)."""

    def delay_s(self, name: str) -> float:
        """Wait before the first READ."""
        ...

    def should_fail(self, stage: str) -> bool:
        """Whether connect, post, copy, verify or notify fails now."""
        ...

    def take(self, name: str) -> bool:
        """Whether to corrupt_block now."""
        ...


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a request ended. Blocks hold verified content only if `ok`."""

    ticket: int
    """What `Puller.submit` returned."""
    ok: bool
    reason: str = ""
    """One of the closed set in `base.py`; "" if `ok`."""
    detail: str = ""
    """For the log."""
    num_bytes: int = 0
    """Read and verified."""
    duration_s: float = 0.0
    """From the first READ posted (or the submission, if none was) to the end."""
    is_terminal: bool = True
    """False: the local blocks must stay quarantined until `on_terminal` is called."""


OnOutcome = Callable[[PullOutcome], None]


def _ignore(outcome: PullOutcome) -> None:
    pass


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Blocks to READ from one peer. Callbacks run in the transfer thread and must not block."""

    descriptor: Descriptor
    """The peer's, of the backend chosen for the pair."""
    nonce: str
    remote_ids: list[int]
    local_ids: list[int]
    digests: list[bytes]
    """16 bytes per block, or none to skip verification."""
    deadline_s: float
    """On the monotonic clock."""
    on_end: OnOutcome
    """Called exactly once."""
    on_terminal: OnOutcome = _ignore
    """Called exactly once more if the outcome was not terminal."""

    def __post_init__(self) -> None:
        assert len(self.remote_ids) == len(self.local_ids) > 0, (self.remote_ids, self.local_ids)
        assert len(self.digests) in (0, len(self.local_ids)), (len(self.digests), len(self.local_ids))


@dataclass(slots=True, eq=False)
class ActivePull:
    """A request that has not ended."""

    ticket: int
    request: PullRequest
    peer: PeerId
    submitted_s: float
    not_before_s: float
    """A test hook delays the first READ."""
    waiting: deque[range]
    """READs not posted yet, as index ranges into the request's lists."""
    in_flight: dict[int, range] = field(default_factory=dict)
    """By the transport's handle."""
    num_verifying: int = 0
    """READs that ended and whose blocks are being compared with their digests."""
    is_connecting: bool = False
    first_read_s: float | None = None
    num_bytes: int = 0
    num_unended_reads: int = 0
    """Given up, but not terminal."""
    outcome: PullOutcome | None = None


def split_into_reads(
    num_blocks: int, block_bytes: int, max_read_bytes: int = MAX_READ_BYTES, *, is_verified: bool = False
) -> deque[range]:
    """Index ranges of READs of at most `max_read_bytes` each, and of at least one block.

    Where they are verified, the last ones become smaller: each takes two thirds of what is left, so that the blocks
    before it are verified while it is copied, and little is left to verify at the end.
    """
    step = max(1, max_read_bytes // block_bytes)
    reads: deque[range] = deque()
    first = 0
    while first < num_blocks:
        left = num_blocks - first
        is_tail = not is_verified or left * block_bytes <= SHORT_TAIL_BYTES
        count = min(step, left if is_tail else -(-2 * left // 3))
        reads.append(range(first, first + count))
        first += count
    return reads
