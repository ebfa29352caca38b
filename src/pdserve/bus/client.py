"""Connections to the bus's server: every call ends in time, and no reply ever reaches the wrong caller.

The server is a Redis or Valkey, named by its URL and reached through redis-py; or a `Server` object of the same
behaviour, such as `memory.MemoryServer`.

No retries inside the library: a repeated XADD doubles an entry behind our back, and the callers here know
better when to try again. A pool waits for a free connection instead of failing. redis-py closes a
connection whose reply was not read (a cancelled or timed-out call), and a test keeps watching that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdserve.errors import BusError

Command = tuple[str | bytes | int | float, ...]
"""A command of Redis: its name and its arguments."""


class Connection(Protocol):
    """One way to the server; more calls at once than it has connections wait for each other."""

    async def run(self, commands: Sequence[Command], *, timeout_s: float, transaction: bool = True) -> list[Any]:
        """Run commands in one round trip (in MULTI when `transaction`).

        Returns:
            Their replies as redis-py gives them; a command that is refused gives its `ResponseError` as a value.

        Raises:
            BusError: no answer within `timeout_s`, no connection, or the whole transaction was refused.
        """
        ...

    async def close(self) -> None:
        """Give the connections up; running calls fail."""
        ...


class Server(Protocol):
    """A server that is no URL."""

    def connect(self) -> Connection:
        """A new way to it, whether it is up or not."""
        ...


def connect(server: str | Server, *, timeout_s: float, max_connections: int = 1) -> Connection:
    """A new way to the server; nothing is sent yet.

    Args:
        server: redis://, rediss:// or unix://, or an object.
        timeout_s: to connect, and to wait for a free connection.
        max_connections: more calls at once wait for each other.
    """
    if isinstance(server, str):
        return RedisConnection(server, timeout_s=timeout_s, max_connections=max_connections)
    return server.connect()


class RedisConnection:
    """Connections of one's own to a Redis; see `Connection` for the guarantees and `connect` for the arguments."""

    def __init__(self, url: str, *, timeout_s: float, max_connections: int) -> None:
        # No socket_timeout: with one, redis-py sends through asyncio.wait_for, which swallows a cancellation on
        # Python 3.11, so that a cancelled reader would go on reading.
        pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._client = Redis.from_pool(pool)

    async def run(self, commands: Sequence[Command], *, timeout_s: float, transaction: bool = True) -> list[Any]:
        """Run commands in one round trip."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._client.pipeline(transaction=transaction) as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    replies: list[Any] = await pipeline.execute(raise_on_error=False)
                    return replies
        except TimeoutError as error:
            raise BusError(f"the bus did not answer within {timeout_s:g} s") from error
        except (RedisError, OSError) as error:
            raise BusError(f"the bus failed: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Give the connections up."""
        await self._client.aclose()
