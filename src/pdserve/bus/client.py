"""redis-py, set up so that every call ends in time and no reply ever reaches the wrong caller.

No retries inside the library: a repeated XADD doubles an entry behind our back, and the callers here know
better when to try again. A pool waits for a free connection instead of failing. redis-py closes a
connection whose reply was not read (a cancelled or timed-out call), and a test keeps watching that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdserve.errors import BusError

Command = tuple[str | bytes | int | float, ...]


def new_client(url: str, *, timeout_s: float, max_connections: int = 1) -> Redis:
    """A client with connections of its own; to be used through `run_commands`, which bounds every call.

    Args:
        url: redis://, rediss:// or unix://.
        timeout_s: to connect, and to wait for a free connection.
        max_connections: more calls at once wait for each other.
    """
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
    return Redis.from_pool(pool)


async def run_commands(
    client: Redis, commands: Sequence[Command], *, timeout_s: float, transaction: bool = True
) -> list[Any]:
    """Run commands in one round trip (in MULTI when `transaction`); their replies, errors among them as values.

    Raises:
        BusError: no answer within `timeout_s`, no connection, or the whole transaction was refused.
    """
    try:
        async with asyncio.timeout(timeout_s):
            async with client.pipeline(transaction=transaction) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
                return replies
    except TimeoutError as error:
        raise BusError(f"the bus did not answer within {timeout_s:g} s") from error
    except (RedisError, OSError) as error:
        raise BusError(f"the bus failed: {type(error).__name__}: {error}") from error
