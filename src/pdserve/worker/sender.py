"""What a worker says to gateways and to other workers, under its current name.

Queues and never waits. Which message is due, and what is in it, is the caller's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.bus.bus import Bus
from pdserve.ids import GatewayId
from pdserve.messages import Message
from pdserve.registration import WorkerRef
from pdserve.worker.identity import Identity


class Sender:
    """One worker's way onto the bus.

    Args:
        identity: names this worker; its generation may change.
        bus: takes the messages.
        publish_delay_s: test hook: how late messages to gateways go out, in seconds, their order kept.
    """

    def __init__(self, identity: Identity, bus: Bus, publish_delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._identity = identity
        self._bus = bus
        self._publish_delay_s = publish_delay_s

    @property
    def ref(self) -> WorkerRef:
        """This worker process now; its two fields stand in all that it says."""
        return self._identity.ref

    def to_gateway(self, gateway_id: GatewayId, message: Message) -> None:
        """Queue a message on a gateway's stream."""
        stream, delay_s = self._bus.keys.tokens(gateway_id), self._publish_delay_s()
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._bus.send, stream, message)
        else:
            self._bus.send(stream, message)

    def to_worker(self, worker: WorkerRef, message: Message) -> None:
        """Queue a message on the inbox of one worker process."""
        self._bus.send(self._bus.keys.inbox(*worker), message)

    def is_held_back(self, gateway_id: GatewayId) -> bool:
        """Whether a gateway's stream is at its bound: what it did not read yet must not grow."""
        return self._bus.is_stream_full(self._bus.keys.tokens(gateway_id))
