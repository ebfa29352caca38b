"""Step 6 of a request: the transfer thread. It READs announced blocks into this worker's own and verifies them.

Before it: the prefill worker announced complete, leased blocks (KvReady). After it: the decode worker's engine
gets them, and the prefill worker a KvRelease. On a prefill worker the same thread answers peers (`serve`).

The thread is the only one that touches the transports (but for `expect` and `forget`); what it does in a round is
in `pull_rounds.py`. It sleeps while there is nothing to do.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping

import torch

from pdserve.errors import TransferError
from pdserve.mailbox import Mailbox
from pdserve.transfer.base import Descriptor, PeerId, Transport
from pdserve.transfer.peer_failures import FailureMark, PeerFailures
from pdserve.transfer.pull import MAX_READ_BYTES, PullFaults, PullRequest
from pdserve.transfer.pull_rounds import PullRounds

_BUSY_WAIT_S = 0.0005
"""Between rounds while READs are on their way."""
_SERVE_WAIT_S = 0.001
_WATCH_WAIT_S = 0.01
"""While there are only quarantined READs, and connections that no request needs yet."""
_IDLE_WAIT_S = 0.25
"""A slow beat, so that a peer's wire-up is answered even where nobody said that leases exist."""

_log = logging.getLogger(__name__)


class Puller:
    """The transfer thread of one worker.

    Every submitted request ends with exactly one `on_end`; one whose outcome is not terminal gets exactly one
    `on_terminal` later. `close` ends all of them.

    Args:
        transports: registered ones, by name.
        kv_cache: `[num_blocks, …]`, the tensor they were registered with.
        faults: test hooks.
        quarantine_s: how long a READ that was given up may stay unended before the agent is recreated (two leases).
        max_quarantined_ratio: of the block pool; beyond it the agent is recreated earlier.
        max_reads_per_peer: on their way at the same time.
        drain_s: how long healthy READs may take to end before an agent is recreated or closed.
        failure_ttl_s: how long a peer's failure mark is shown.
        on_descriptor: called in the transfer thread when a descriptor changed: announce it.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        kv_cache: torch.Tensor,
        *,
        faults: PullFaults | None = None,
        quarantine_s: float = 20.0,
        max_quarantined_ratio: float = 0.1,
        max_read_bytes: int = MAX_READ_BYTES,
        max_reads_per_peer: int = 2,
        drain_s: float = 2.0,
        failure_ttl_s: float = 10.0,
        on_descriptor: Callable[[Descriptor], None] = lambda descriptor: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = PeerFailures(failure_ttl_s, clock)
        self._rounds = PullRounds(
            transports,
            kv_cache,
            self._failures,
            faults=faults,
            quarantine_s=quarantine_s,
            max_quarantined_ratio=max_quarantined_ratio,
            max_read_bytes=max_read_bytes,
            max_reads_per_peer=max_reads_per_peer,
            drain_s=drain_s,
            on_descriptor=on_descriptor,
            on_verdict=self._wake_up,
            clock=clock,
        )
        self._tickets = itertools.count(1)
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._lock = threading.Lock()
        self._is_closing = False
        self._is_serving = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    # --- any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def prepare(self, descriptor: Descriptor) -> None:
        """Connect to a peer before its first request: the first READ from a peer is slow."""
        self._command(lambda: self._rounds.prepare(descriptor))

    def submit(self, request: PullRequest) -> int:
        """Fetch blocks; returns a ticket for `abort`.

        Raises:
            TransferError: reason aborted: the puller is closed.
        """
        ticket = next(self._tickets)
        self._command(lambda: self._rounds.begin(ticket, request))
        self._rounds.expect(request)  # here, since the transfer thread is just waking up
        return ticket

    def abort(self, ticket: int) -> None:
        """End a request with reason aborted, unless it has ended."""
        self._command(lambda: self._rounds.abort(ticket))

    def disconnect(self, peer: PeerId) -> None:
        """Drop a peer that is gone; requests to it end with reason disconnected."""
        self._command(lambda: self._rounds.disconnect(peer))

    def set_serving(self, is_serving: bool) -> None:
        """Whether leases exist, so that peers may READ from this worker at any moment."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._wake_up()

    def failed_peers(self) -> dict[PeerId, FailureMark]:
        """Peers whose last transfer failed a short while ago."""
        return self._failures.marks()

    @property
    def num_failures_in_a_row(self) -> int:
        """Failed requests since the last one that worked, over all peers."""
        return self._failures.num_in_a_row

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of READs that were given up and have not ended."""
        return self._rounds.num_quarantined_blocks

    @property
    def num_recreated(self) -> int:
        """Agents recreated to end a quarantine."""
        return self._rounds.num_recreated

    def close(self) -> None:
        """Let READs on their way end for a short while, then tear everything down: a fence. Again: nothing."""
        with self._lock:
            self._is_closing = True
        self._wake_up()
        if self._thread.is_alive():
            self._thread.join()
        elif self._thread.ident is None:
            self._take_commands()
            self._rounds.tear_down()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closing:
                raise TransferError("aborted", "the transfer thread is closed")
            self._commands.put(command)

    def _wake_up(self) -> None:
        self._commands.put(_do_nothing)

    # --- the transfer thread

    def _run(self) -> None:
        is_busy = True
        while not self._is_closing:
            try:
                if not is_busy:
                    self._commands.wait(self._wait_s())
                self._take_commands()
                is_busy = self._rounds.round()
            except Exception:
                _log.exception("a round of the transfer thread failed; it goes on")
                is_busy = False
        self._take_commands()
        self._rounds.drain()
        self._rounds.tear_down()

    def _wait_s(self) -> float:
        if self._rounds.has_pulls:
            return _BUSY_WAIT_S
        if self._is_serving:
            return _SERVE_WAIT_S
        is_watching = self._rounds.num_quarantined_blocks or self._rounds.is_preparing
        return _WATCH_WAIT_S if is_watching else _IDLE_WAIT_S

    def _take_commands(self) -> None:
        for command in self._commands.take():
            command()


def _do_nothing() -> None:
    pass
