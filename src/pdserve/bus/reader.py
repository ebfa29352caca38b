"""Reads one stream for ever and hands every message to one handler.

In words: connect; if another server answers than before, start over from the beginning; then, without end,
forget on the server what was processed, wait for entries after the last processed one, and hand their
messages on. Whatever fails, reconnect. Never reads from `$`, which loses what arrives between two calls,
and never lets an entry or a handler's exception end the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from pdserve.bus.bus import Bus
from pdserve.bus.client import Command, Connection, connect
from pdserve.bus.liveness import Deafness
from pdserve.errors import BusError
from pdserve.log import get_logger
from pdserve.messages import AnyMessage, decode

_log = get_logger(__name__)

BLOCK_S = 0.5
SLACK_S = 0.25
"""On top of BLOCK_S before silence counts as deafness."""
MAX_ENTRIES_PER_READ = 128
TRIM_ENTRIES = 64
"""Processed entries are removed by the dozen, or after TRIM_S."""
TRIM_S = 1.0
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.5

EntryId = tuple[int, int]
_BEGINNING: EntryId = (0, 0)


class StreamReader:
    """The only reader of one stream."""

    def __init__(self, bus: Bus, stream: str, handler: Callable[[AnyMessage], None]) -> None:
        self._bus = bus
        self._stream = stream
        self._handler = handler
        self._run_id: str | None = None
        self._last_id = _BEGINNING
        """Id of the last entry processed."""
        self._trimmed_id = _BEGINNING
        self._num_untrimmed = 0
        self._trimmed_s = 0.0
        self._deafness = Deafness(silence_s=BLOCK_S + SLACK_S, last_heard_s=bus.clock(), lost_since_s=bus.clock())

    @property
    def is_connected(self) -> bool:
        """Whether the server answers this reader."""
        return not self._deafness.is_deaf(self._bus.clock())

    @property
    def disconnected_s(self) -> float:
        """Total time in which this reader could not hear; only grows, and never jumps."""
        return self._deafness.total_s(self._bus.clock())

    async def run(self) -> None:
        """Read until this is cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            heard_s = self._deafness.last_heard_s
            try:
                await self._read_until_it_fails()
            except BusError as error:
                if self._deafness.lost_since_s is None:
                    _log.warning("reader of %s lost the bus, reconnecting: %s", self._stream, error)
            except Exception:
                _log.exception("reader of %s failed, reconnecting", self._stream)
            self._deafness.lost(self._bus.clock())
            has_heard = self._deafness.last_heard_s > heard_s
            retry_s = FIRST_RETRY_S if has_heard else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _read_until_it_fails(self) -> None:
        connection = connect(self._bus.server, timeout_s=self._bus.timeout_s)
        try:
            await self._meet_server(connection)
            while True:
                entries = await self._read(connection)
                self._deafness.heard(self._bus.clock())
                for entry_id, fields in entries:
                    self._process(fields)
                    self._last_id = _parse_id(entry_id)
                if not entries:
                    await self._check_position(connection)
        finally:
            await connection.close()

    async def _meet_server(self, connection: Connection) -> None:
        (info,) = await self._execute(connection, ("INFO", "server"))
        run_id = str(info["run_id"])
        if self._run_id not in (None, run_id):
            _log.warning("another server answers: reading %s from its beginning", self._stream)
            self._last_id = self._trimmed_id = _BEGINNING
        self._run_id = run_id

    async def _read(self, connection: Connection) -> list[tuple[bytes, dict[bytes, bytes]]]:
        commands: list[Command] = []
        if self._is_trim_due():
            commands.append(("XTRIM", self._stream, "MINID", _format_id((self._last_id[0], self._last_id[1] + 1))))
        block_ms = int(1000 * BLOCK_S)
        last_id = _format_id(self._last_id)
        commands.append(("XREAD", "COUNT", MAX_ENTRIES_PER_READ, "BLOCK", block_ms, "STREAMS", self._stream, last_id))
        replies = await self._execute(connection, *commands)
        if len(commands) > 1:
            self._trimmed_id, self._trimmed_s, self._num_untrimmed = self._last_id, self._bus.clock(), 0
        streams = replies[-1]
        return list(streams[0][1]) if streams else []

    def _is_trim_due(self) -> bool:
        if self._last_id == self._trimmed_id:
            return False
        return self._num_untrimmed >= TRIM_ENTRIES or self._bus.clock() - self._trimmed_s >= TRIM_S

    async def _check_position(self, connection: Connection) -> None:
        """An idle stream whose last id is below ours was made anew (lost, evicted, failed over): start over."""
        try:
            (about,) = await self._execute(connection, ("XINFO", "STREAM", self._stream))
        except BusError as error:
            if not isinstance(error.__cause__, ResponseError):
                raise
            self._last_id = self._trimmed_id = _BEGINNING  # there is no such key
            return
        about = dict(zip(about[::2], about[1::2], strict=True))
        if _parse_id(about[b"last-generated-id"]) < self._last_id:
            _log.warning("%s was made anew: reading it from its beginning", self._stream)
            self._last_id = self._trimmed_id = _BEGINNING

    async def _execute(self, connection: Connection, *commands: Command) -> list[Any]:
        limit_s = self._bus.timeout_s + BLOCK_S
        replies = await connection.run(commands, timeout_s=limit_s, transaction=False)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, ResponseError):
                raise BusError(f"the bus refused {command[0]!r}: {reply}") from reply
        return replies

    def _process(self, fields: dict[bytes, bytes]) -> None:
        self._num_untrimmed += 1
        try:
            messages = decode(fields.get(b"m", b""))
        except BusError as error:
            _log.error("an entry of %s is skipped: %s", self._stream, error)
            return
        for message in messages:
            try:
                self._handler(message)
            except Exception:
                _log.exception("handling of %s failed: a programming error", _about(message))


def _about(message: AnyMessage) -> str:
    """A message's type and attempt; never what it carries."""
    return f"{type(message).__name__} {getattr(message, 'key', '')}".strip()


def _parse_id(text: bytes | str) -> EntryId:
    milliseconds, _, sequence = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return int(milliseconds), int(sequence or 0)


def _format_id(entry_id: EntryId) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"
