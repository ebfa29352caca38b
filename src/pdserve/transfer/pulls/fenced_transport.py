"""One transport of a transfer thread, with the READs of it that were given up before they ended.

They stay in quarantine until the transport reports them terminal. When waiting has become too expensive, other READs
may end for a short while, then the agent is recreated: a fence, after which every READ is terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from pdserve.errors import TransferError
from pdserve.transfer.base import Descriptor, Transport
from pdserve.transfer.pulls.active_pull import ActivePull
from pdserve.transfer.pulls.quarantine import Quarantine

_log = logging.getLogger(__name__)


class FencedTransport:
    """A transport and its quarantine, touched by one thread alone.

    Args:
        transport: a registered one.
        quarantine: an empty one.
        drain_s: how long healthy READs may take to end before the agent is recreated.
        on_descriptor: called with the new agent's descriptor.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transport: Transport,
        quarantine: Quarantine,
        *,
        drain_s: float,
        on_descriptor: Callable[[Descriptor], None],
        clock: Callable[[], float],
    ) -> None:
        self.transport, self.quarantine = transport, quarantine
        self.is_broken = False
        """Whether the last agent could not be recreated: no READ can be posted any more."""
        self._drain_s, self._on_descriptor, self._clock = drain_s, on_descriptor, clock
        self._draining_since_s: float | None = None

    @property
    def is_draining(self) -> bool:
        """Whether the agent is about to be recreated, so that no further READ should be posted."""
        return self._draining_since_s is not None

    def give_up(self, pull: ActivePull) -> None:
        """Abort a request's READs on their way; those for which that is no fence go into quarantine."""
        for handle, indices in pull.in_flight.items():
            if not self.transport.abort(handle):
                self.quarantine.add(handle, pull, len(indices))
        pull.in_flight.clear()

    def look_after(self, pulls: Collection[ActivePull]) -> None:
        """Recreate the agent when it is time for that.

        Args:
            pulls: all requests to this transport's peers that have not ended.
        """
        if not self.quarantine:
            self._draining_since_s = None
            return
        now_s = self._clock()
        if self.quarantine.is_overdue and self._draining_since_s is None:
            self._draining_since_s = now_s
        if self._draining_since_s is not None:
            is_idle = not any(pull.in_flight for pull in pulls)
            if is_idle or now_s - self._draining_since_s >= self._drain_s:
                self._recreate(pulls)

    def close(self) -> None:
        """Close the transport: a fence."""
        self.transport.close()
        self._empty_quarantine()

    def _recreate(self, pulls: Collection[ActivePull]) -> None:
        """The fence: everything given up is terminal afterwards, and READs lost by it are posted again."""
        name = self.transport.name
        _log.warning("recreating the %s agent: %d blocks are quarantined", name, self.quarantine.num_blocks)
        try:
            self._on_descriptor(self.transport.recreate())
        except TransferError:
            self.is_broken = True
            _log.exception("the %s agent was destroyed, but a new one does not start; its transfers will fail", name)
        self._draining_since_s = None
        for pull in pulls:
            pull.waiting.extendleft(pull.in_flight.values())
            pull.in_flight.clear()
            pull.is_connecting = False
        self._empty_quarantine()

    def _empty_quarantine(self) -> None:
        for pull in self.quarantine.remove_all():
            pull.tell_if_terminal()
