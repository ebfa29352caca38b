"""A process's way to the bus: one writer that packs, and one watch over the server.

The writer, in words: wait until something is queued; take what is there; make one entry per stream of it;
write all entries in one transaction, each with its stream's time to live; while that fails, wait a little
and repeat. So the order within a stream is kept, and an entry may be written twice but never half.
Neither the writer nor the watch ever ends by an exception: without them a process is mute or blind.

It never blocks a sender, never trims a stream, and never decides what a lost server means: it tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from pdserve.bus.client import Command, Server, connect
from pdserve.bus.keys import Keys
from pdserve.bus.liveness import ServerWatch
from pdserve.bus.outbox import Outbox
from pdserve.bus.tamper import Tampering
from pdserve.errors import BusError
from pdserve.faults import Faults
from pdserve.log import get_logger
from pdserve.messages import Message, encode

_log = get_logger(__name__)

MAX_MESSAGES_PER_FLUSH = 256
"""Bounds an entry: 256 jobs of 128k tokens stay below Redis' limit of 512 MB for one value."""
WATCH_INTERVAL_S = 0.5
FULL_WATCH_INTERVAL_S = 0.1
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.5


class Bus:
    """The bus, seen from one process. Used from the event loop's thread only.

    Args:
        server: URL of a Redis, or a server inside this process (`memory.MemoryServer`).
        service: whose keys; services that share a server do not see each other.
        timeout_s: after which any call to the server fails.
        faults: test hooks on outgoing messages.
        stream_ttl_s: life of a stream after its last entry.
        max_stream_entries: beyond this a stream is full.
        max_queued_messages: kept while the server is away; beyond this the oldest are dropped.
    """

    def __init__(
        self,
        server: str | Server,
        service: str,
        *,
        timeout_s: float,
        faults: Faults | None = None,
        stream_ttl_s: float = 600.0,
        max_stream_entries: int = 10_000,
        max_queued_messages: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = server
        self.keys = Keys(service)
        self.timeout_s = timeout_s
        self.clock = clock
        self.num_refused_messages = 0
        """Messages that could not be packed or sent, or whose stream's key is no stream."""
        self._stream_ttl_ms = int(1000 * stream_ttl_s)
        self._max_stream_entries = max_stream_entries
        self._outbox = Outbox(max_queued_messages)
        self._tampering = Tampering(faults, self._put) if faults is not None else None
        self._connection = connect(server, timeout_s=timeout_s, max_connections=8)
        self._watch = ServerWatch()
        self._server_time_offset_s = 0.0
        self._full_streams: set[str] = set()
        self._new_server_callbacks: list[Callable[[], None]] = []
        self._has_messages = asyncio.Event()
        self._check_now = asyncio.Event()
        self._answered = asyncio.Event()
        self._last_problem = ""
        self._progress = asyncio.Condition()
        self._num_settled = 0
        self._tasks: list[asyncio.Task[None]] = []

    # --- what others ask

    @property
    def is_up(self) -> bool:
        """Whether the server answered when last asked."""
        return self._watch.is_up

    @property
    def run_id(self) -> str | None:
        """Identity of the server last heard; another one after a restart or a failover."""
        return self._watch.run_id

    @property
    def up_since_s(self) -> float | None:
        """Monotonic start of the continuous connection to this `run_id`; None while it is down."""
        return self._watch.up_since_s

    @property
    def num_reconnects(self) -> int:
        """How often the connection came back."""
        return self._watch.num_reconnects

    @property
    def num_dropped_messages(self) -> int:
        """Messages forgotten because the queue was full during an outage."""
        return self._outbox.num_dropped

    def server_time_s(self) -> float:
        """The server's wall clock, as far as known: the only one that all processes share."""
        return self.clock() + self._server_time_offset_s

    def is_stream_full(self, stream: str) -> bool:
        """Whether the stream was longer than its bound when last written or watched: hold back."""
        return stream in self._full_streams

    def on_new_server(self, callback: Callable[[], None]) -> None:
        """Call back when another server answers (restart, failover, empty): register again, send rosters."""
        self._new_server_callbacks.append(callback)

    # --- life

    async def start(self) -> None:
        """Ask for the server once, then keep writing and watching. A server that is away is no error here."""
        await self._check()
        if not self.is_up:
            _log.warning("the bus does not answer yet, trying again: %s", self._last_problem)
        self._tasks = [asyncio.create_task(self._write_forever()), asyncio.create_task(self._watch_forever())]

    async def wait_for_end(self, start_timeout_s: float | None = None) -> None:
        """Return, or raise, when the writer or the watch has ended, which is a defect before `close`.

        Raises:
            BusError: the server has not answered once within `start_timeout_s`.
        """
        try:
            async with asyncio.timeout(start_timeout_s):
                await self._answered.wait()
        except TimeoutError:
            raise BusError(
                f"no answer within {start_timeout_s:g} s after the start ({self._last_problem}): see whether a Redis "
                "runs there, and whether REDIS_URL has its address and password"
            ) from None
        ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def close(self) -> None:
        """Send what is queued if the server takes it in time, then stop."""
        with contextlib.suppress(BusError):
            await self.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._connection.close()

    # --- writing

    def send(self, stream: str, message: Message) -> None:
        """Queue a message. Never blocks and never raises; it may be lost when the bus is away for long."""
        if self._tampering is None:
            self._put(stream, message)
        else:
            self._tampering.send(stream, message)

    async def flush(self) -> None:
        """Wait until everything sent so far is on the bus.

        Raises:
            BusError: it is not, within the timeout; it stays queued.
        """
        goal = self._outbox.num_put
        try:
            async with asyncio.timeout(self.timeout_s), self._progress:
                await self._progress.wait_for(lambda: self._num_settled + self._outbox.num_dropped >= goal)
        except TimeoutError as error:
            raise BusError(f"{len(self._outbox)} messages are still queued after {self.timeout_s:g} s") from error

    async def execute(self, *commands: Command, transaction: bool = True) -> list[Any]:
        """Run commands in one bounded round trip.

        Raises:
            BusError: the server did not answer in time, or refused one of them.
        """
        replies = await self._connection.run(commands, timeout_s=self.timeout_s, transaction=transaction)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, ResponseError):
                raise BusError(f"the bus refused {command[0]!r}: {reply}") from reply
        return replies

    def _put(self, stream: str, message: Message) -> None:
        self._outbox.put(stream, message)
        self._has_messages.set()

    async def _write_forever(self) -> None:
        while True:
            await self._has_messages.wait()
            batch = self._outbox.take(MAX_MESSAGES_PER_FLUSH)
            if not self._outbox:
                self._has_messages.clear()
            try:
                await self._deliver(self._pack(batch))
            except Exception:
                self.num_refused_messages += sum(map(len, batch.values()))
                _log.exception("messages for %d streams are dropped: a programming error", len(batch))
            async with self._progress:
                self._num_settled += sum(len(messages) for messages in batch.values())
                self._progress.notify_all()

    def _pack(self, batch: dict[str, list[Message]]) -> dict[str, bytes]:
        packed: dict[str, bytes] = {}
        for stream, messages in batch.items():
            try:
                packed[stream] = encode(messages)
            except Exception:
                readable = [message for message in messages if self._can_encode(message)]
                packed[stream] = encode(readable)
        return packed

    def _can_encode(self, message: Message) -> bool:
        try:
            encode([message])
        except Exception:
            self.num_refused_messages += 1
            _log.exception("a %s cannot be packed and is dropped: a programming error", type(message).__name__)
            return False
        return True

    async def _deliver(self, entries: dict[str, bytes]) -> None:
        retry_s = FIRST_RETRY_S
        while entries:
            try:
                entries = self._take_note(entries, await self._write(entries))
            except BusError as error:
                if retry_s == FIRST_RETRY_S:
                    _log.warning("cannot write to the bus, will repeat until it takes it: %s", error)
                if not isinstance(error.__cause__, ResponseError):
                    self._watch.lost()
                self._check_now.set()
            if entries:
                await self._wait_for_an_answer(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _wait_for_an_answer(self, at_most_s: float) -> None:
        self._answered.clear()
        await asyncio.sleep(FIRST_RETRY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._answered.wait()

    async def _write(self, entries: dict[str, bytes]) -> list[Any]:
        commands: list[Command] = []
        for stream, payload in entries.items():
            commands.append(("XADD", stream, "*", "m", payload))
            commands.append(("PEXPIRE", stream, self._stream_ttl_ms))
            commands.append(("XLEN", stream))
        return await self._connection.run(commands, timeout_s=self.timeout_s)

    def _take_note(self, entries: dict[str, bytes], replies: Sequence[Any]) -> dict[str, bytes]:
        """Remember which streams are full; the entries that are still to be written."""
        left: dict[str, bytes] = {}
        for index, (stream, payload) in enumerate(entries.items()):
            added, _, length = replies[3 * index : 3 * index + 3]
            if isinstance(added, ResponseError) and str(added).startswith("WRONGTYPE"):
                self.num_refused_messages += 1
                _log.error("%s is no stream: an entry of %d bytes is dropped", stream, len(payload))
            elif isinstance(added, Exception):
                left[stream] = payload
            else:
                self._note_length(stream, length)
        return left

    def _note_length(self, stream: str, length: object) -> None:
        if isinstance(length, int) and length > self._max_stream_entries:
            self._full_streams.add(stream)
        else:
            self._full_streams.discard(stream)

    # --- watching the server

    async def _watch_forever(self) -> None:
        while True:
            interval_s = FULL_WATCH_INTERVAL_S if self._full_streams else WATCH_INTERVAL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._check_now.wait()
                    # A writer in trouble asks at once, but a dead server is not asked without pause.
                    await asyncio.sleep(FIRST_RETRY_S)
            self._check_now.clear()
            try:
                await self._check()
            except Exception:
                _log.exception("looking after the bus failed: a programming error")
                self._watch.lost()

    async def _check(self) -> None:
        full = list(self._full_streams)
        try:
            info, server_time, *lengths = await self.execute(
                ("INFO", "server"), ("TIME",), *(("XLEN", stream) for stream in full), transaction=False
            )
        except BusError as error:
            self._last_problem = str(error)
            if self.is_up:
                _log.warning("the bus is away: %s", error)
            self._watch.lost()
            return
        for stream, length in zip(full, lengths, strict=True):
            self._note_length(stream, length)
        now_s = self.clock()
        self._server_time_offset_s = server_time[0] + server_time[1] / 1e6 - now_s
        await self._note_answer(str(info["run_id"]), now_s)

    async def _note_answer(self, run_id: str, now_s: float) -> None:
        is_first, num_reconnects = self._watch.run_id is None, self._watch.num_reconnects
        is_new_server = self._watch.answered(run_id, now_s)
        self._answered.set()
        if self._watch.num_reconnects != num_reconnects:
            _log.warning("the bus is back%s", ", another server or restarted" if is_new_server else "")
        if is_new_server:
            call_all(self._new_server_callbacks)
        if is_first or is_new_server:
            await self._warn_if_it_evicts()  # last: callbacks must not wait for one more answer

    async def _warn_if_it_evicts(self) -> None:
        # INFO and not CONFIG GET, which managed servers forbid.
        with contextlib.suppress(BusError):
            (info,) = await self.execute(("INFO", "memory"))
            policy = info.get("maxmemory_policy", "noeviction")
            if policy != "noeviction":
                _log.warning("the bus evicts keys (maxmemory-policy %s): set noeviction, or messages get lost", policy)


def call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    """Call each; one that fails is logged and does not keep the others from being called."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _log.exception("a callback of the bus failed: a programming error")
