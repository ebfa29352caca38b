"""Connecting a transport to a peer at once: tests have no transfer thread that looks again later."""

from __future__ import annotations

import time

from pdserve.transfer.base import Descriptor, Transport


def wait_connected(transport: Transport, descriptor: Descriptor) -> None:
    """Connect and wait; `is_connected` bounds the wait. Raises what `start_connect` and `is_connected` raise."""
    transport.start_connect(descriptor)
    while not transport.is_connected(descriptor.peer):
        time.sleep(0.0005)
