"""A server inside this process: the part of Redis that this package uses, for tests and for one process alone.

It answers the same commands with the same replies and refusals; tests/bus/test_contract.py runs over both. It can be
stopped, and come back or be started again, empty and under another `run_id`. Nothing leaves the process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from pdserve.bus.client import Command, Connection
from pdserve.errors import BusError

EntryId = tuple[int, int]
Fields = dict[bytes, bytes]


@dataclass(slots=True)
class _Stream:
    entries: list[tuple[EntryId, Fields]] = field(default_factory=list)
    last_id: EntryId = (0, 0)


class _SortedSet(dict[str, float]):
    """Names and their scores."""


V = TypeVar("V", bytes, _SortedSet, _Stream)


class MemoryServer:
    """One server; up from the beginning. Used from the event loop's thread only.

    Args:
        clock: monotonic seconds; times to live and the server's own time run on it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, bytes | _SortedSet | _Stream] = {}
        self._expiry_s: dict[str, float] = {}
        self._news = asyncio.Event()
        self.is_up = False
        self.run_id = ""
        self.start()

    def start(self) -> None:
        """Come up, empty, as another server than before."""
        self._values.clear()
        self._expiry_s.clear()
        self.run_id = secrets.token_hex(20)
        self.come_back()

    def come_back(self) -> None:
        """Be reachable again as the same server, as after a break of the network."""
        self.is_up = True

    def stop(self) -> None:
        """Go away; running calls fail, and so do all later ones."""
        self.is_up = False
        self._wake_readers()

    def connect(self) -> Connection:
        """A new way to this server."""
        return MemoryConnection(self)

    def wait_for_news(self) -> asyncio.Event:
        """Set with the next entry of any stream, and when the server stops."""
        return self._news

    def run(self, command: Command) -> Any:
        """Run one command now; its reply, or a `ResponseError` as a value."""
        name, *arguments = command
        method = getattr(self, f"_{_text(name).lower()}", None)
        if method is None:
            return ResponseError(f"unknown command '{_text(name)}'")
        for key in [key for key, expiry_s in self._expiry_s.items() if expiry_s <= self._clock()]:
            self._del(key)
        try:
            return method(*arguments)
        except ResponseError as error:
            return error

    def _wake_readers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _value(self, key: Any, kind: type[V]) -> V | None:
        value = self._values.get(_text(key))
        if value is not None and not isinstance(value, kind):
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _made(self, key: Any, kind: type[V]) -> V:
        value = self._value(key, kind)
        if value is None:
            value = self._values[_text(key)] = kind()
        return value

    # --- the server

    def _echo(self, text: Any) -> bytes:
        return _bytes(text)

    def _info(self, section: str) -> dict[str, str]:
        return {"run_id": self.run_id, "maxmemory_policy": "noeviction"}

    def _time(self) -> tuple[int, int]:
        now_s = self._clock()
        return int(now_s), int(now_s % 1 * 1_000_000)

    # --- keys

    def _pexpire(self, key: Any, ttl_ms: int) -> int:
        if _text(key) not in self._values:
            return 0
        self._expiry_s[_text(key)] = self._clock() + ttl_ms / 1000
        return 1

    def _del(self, *keys: Any) -> int:
        for key in keys:
            self._expiry_s.pop(_text(key), None)
        return sum(self._values.pop(_text(key), None) is not None for key in keys)

    def _set(self, key: Any, value: Any, *px: Any) -> bool:
        self._del(key)
        self._values[_text(key)] = _bytes(value)
        if px:
            self._pexpire(key, px[1])
        return True

    def _get(self, key: Any) -> bytes | None:
        return self._value(key, bytes)

    def _mget(self, *keys: Any) -> list[bytes | None]:
        values = [self._values.get(_text(key)) for key in keys]
        return [value if isinstance(value, bytes) else None for value in values]

    # --- sorted sets

    def _zadd(self, key: Any, score: float, name: Any) -> int:
        names = self._made(key, _SortedSet)
        num_before = len(names)
        names[_text(name)] = float(score)
        return len(names) - num_before

    def _zrem(self, key: Any, *names: Any) -> int:
        known = self._value(key, _SortedSet) or _SortedSet()
        return sum(known.pop(_text(name), None) is not None for name in names)

    def _zrange(self, key: Any, first: int, last: int) -> list[bytes]:
        names = self._value(key, _SortedSet) or _SortedSet()
        ordered = sorted(names, key=lambda name: (names[name], name))
        return [name.encode() for name in ordered[first : None if last == -1 else last + 1]]

    def _zremrangebyscore(self, key: Any, low: Any, high: Any) -> int:
        names = self._value(key, _SortedSet) or _SortedSet()
        return self._zrem(key, *[name for name, score in names.items() if float(low) <= score <= float(high)])

    # --- streams

    def _xadd(self, key: Any, entry_id: Any, *fields: Any) -> bytes:
        stream = self._made(key, _Stream)
        if _text(entry_id) == "*":
            now_ms = int(1000 * self._clock())
            new_id = max((now_ms, 0), (stream.last_id[0], stream.last_id[1] + 1))
        else:
            new_id = _parsed(entry_id)
        if new_id <= stream.last_id:
            raise ResponseError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        pairs = {_bytes(name): _bytes(value) for name, value in zip(fields[::2], fields[1::2], strict=True)}
        stream.entries.append((new_id, pairs))
        stream.last_id = new_id
        self._wake_readers()
        return _formatted(new_id)

    def _xlen(self, key: Any) -> int:
        stream = self._value(key, _Stream)
        return len(stream.entries) if stream is not None else 0

    def _xrange(self, key: Any, first: Any, last: Any) -> list[tuple[bytes, Fields]]:
        assert (first, last) == ("-", "+"), f"only whole streams can be listed, not [{first}, {last}]"
        stream = self._value(key, _Stream) or _Stream()
        return [(_formatted(entry_id), fields) for entry_id, fields in stream.entries]

    def _xtrim(self, key: Any, strategy: str, first_kept: Any) -> int:
        assert strategy == "MINID", f"streams are trimmed by MINID, not by {strategy}"
        stream = self._value(key, _Stream) or _Stream()
        kept = [entry for entry in stream.entries if entry[0] >= _parsed(first_kept)]
        num_removed = len(stream.entries) - len(kept)
        stream.entries = kept
        return num_removed

    def _xinfo(self, about: str, key: Any) -> list[Any]:
        stream = self._value(key, _Stream)
        if stream is None:
            raise ResponseError("ERR no such key")
        return [b"length", len(stream.entries), b"last-generated-id", _formatted(stream.last_id)]

    def _xread(self, *arguments: Any) -> list[list[Any]]:
        options = _options_of_xread(arguments)
        found = []
        for key, after in options.positions.items():
            stream = self._value(key, _Stream) or _Stream()
            entries = [(_formatted(entry_id), fields) for entry_id, fields in stream.entries if entry_id > after]
            if entries:
                found.append([key.encode(), entries[: options.count]])
        return found


class MemoryConnection:
    """A way to a `MemoryServer`; see `Connection` for the guarantees. Never waits but where a command blocks."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._run_id: str | None = None
        """The server that it is connected to; None: none yet."""

    async def run(self, commands: Sequence[Command], *, timeout_s: float, transaction: bool = True) -> list[Any]:
        """Run commands at once; a blocking XREAD waits for an entry."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(0)
                return [await self._reply(command) for command in commands]
        except TimeoutError as error:
            raise BusError(f"the bus did not answer within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Do nothing: no connection is held."""

    async def _reply(self, command: Command) -> Any:
        reply = self._run(command)
        if command[0] != "XREAD" or reply or (block_s := _options_of_xread(command[1:]).block_s) is None:
            return reply
        try:
            async with asyncio.timeout(block_s):
                while not reply:
                    await self._server.wait_for_news().wait()
                    reply = self._run(command)
        except TimeoutError:
            return []
        return reply

    def _run(self, command: Command) -> Any:
        is_broken = self._run_id not in (None, self._server.run_id)
        self._run_id = self._server.run_id if self._server.is_up else None
        if is_broken or not self._server.is_up:
            raise BusError("the bus failed: the server went away")
        return self._server.run(command)


@dataclass(frozen=True, slots=True)
class _ReadOptions:
    positions: dict[str, EntryId]
    """Last entry already read, by stream."""
    count: int | None = None
    """Most entries of each stream."""
    block_s: float | None = None
    """How long to wait for an entry; None: not at all."""


def _options_of_xread(arguments: Sequence[Any]) -> _ReadOptions:
    """Read `[COUNT n] [BLOCK ms] STREAMS key... id...`."""
    first = arguments.index("STREAMS") + 1
    options = dict(zip(arguments[: first - 1 : 2], arguments[1 : first - 1 : 2], strict=True))
    keys, ids = arguments[first : (first + len(arguments)) // 2], arguments[(first + len(arguments)) // 2 :]
    positions = {_text(key): _parsed(entry_id) for key, entry_id in zip(keys, ids, strict=True)}
    block_ms = options.get("BLOCK")
    return _ReadOptions(positions, options.get("COUNT"), None if block_ms is None else block_ms / 1000)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _parsed(entry_id: Any) -> EntryId:
    milliseconds, _, number = _text(entry_id).partition("-")
    return int(milliseconds), int(number or 0)


def _formatted(entry_id: EntryId) -> bytes:
    return f"{entry_id[0]}-{entry_id[1]}".encode()
