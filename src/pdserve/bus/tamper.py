"""Test hooks on outgoing messages: lost, doubled, late, out of order. Exists only while PDS_FAULTS is set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.faults import Faults, MessageAction
from pdserve.messages import Message

REORDER_LIMIT_S = 0.5
"""A message waits this long for a next one to overtake it."""


class Tampering:
    """Stands between `Bus.send` and the queue."""

    def __init__(self, faults: Faults, put: Callable[[str, Message], None]) -> None:
        self._faults = faults
        self._put = put
        self._overtaken: dict[str, list[Message]] = {}

    def send(self, stream: str, message: Message) -> None:
        """Pass a message on, or do to it what the faults say."""
        fault = self._faults.on_message(type(message).__name__)
        if fault is None:
            self._pass_on(stream, message)
        elif fault.action is MessageAction.DUPLICATE:
            self._pass_on(stream, message)
            self._pass_on(stream, message)
        elif fault.action is MessageAction.DELAY:
            asyncio.get_running_loop().call_later(fault.delay_s, self._pass_on, stream, message)
        elif fault.action is MessageAction.REORDER:
            self._overtaken.setdefault(stream, []).append(message)
            asyncio.get_running_loop().call_later(REORDER_LIMIT_S, self._release, stream)

    def _pass_on(self, stream: str, message: Message) -> None:
        self._put(stream, message)
        self._release(stream)

    def _release(self, stream: str) -> None:
        for message in self._overtaken.pop(stream, ()):
            self._put(stream, message)
