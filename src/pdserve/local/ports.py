"""TCP ports of this machine: whether one is free, and holding it for a process that starts later."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

from pdserve.addresses import hold
from pdserve.errors import ServiceError

_NEVER_GIVEN_AWAY = range(20_000, 32_000)
"""Ports that the kernel gives to no connection on its way out, which could take one before its server starts."""
_MAX_TRIES = 200
"""Ports that are tried at random before the address itself is doubted."""
_chance = random.SystemRandom()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. (Another program may take it a moment later.)"""
    try:
        hold(host, port).close()
    except OSError:
        return False
    return True


def check_free(host: str, port: int) -> int:
    """Return `port`, or a free one for 0.

    Raises:
        ServiceError: another program listens there, or nothing can listen on `host`.
    """
    if port == 0:
        return _any_free(host)
    if not is_free(host, port):
        raise ServiceError(f"port {port} on {host} is taken by another program: choose one with --port (0 = any free)")
    return port


def _any_free(host: str) -> int:
    for port in _chance.sample(_NEVER_GIVEN_AWAY, _MAX_TRIES):
        if is_free(host, port):
            return port
    raise ServiceError(f"no server can listen on {host}: is it an address of this machine?")


def hold_port(host: str, port: int) -> socket.socket:
    """Hold `port`, or a free one for 0, until the socket is closed: no other program can take it.

    Raises:
        ServiceError: another program listens there, or nothing can listen on `host`.
    """
    for _ in range(_MAX_TRIES):
        chosen = check_free(host, port)
        with contextlib.suppress(OSError):  # taken in this very moment
            return hold(host, chosen)
    raise ServiceError(f"no server can listen on {host}: is it an address of this machine?")


def hold_ports(host: str, first: int) -> Iterator[socket.socket]:
    """Hold the free ports from `first` upwards, one after the other."""
    for port in range(first, 65536):
        with contextlib.suppress(OSError):
            yield hold(host, port)
    raise ServiceError(f"no free port above {first} on {host}")
