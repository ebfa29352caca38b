"""TCP ports of this machine: whether one is free, and which are."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from pdserve.errors import ServiceError

_NEVER_GIVEN_AWAY = range(20_000, 32_000)
"""Ports that the kernel gives to no connection on its way out, which could take one before its server starts."""
_MAX_TRIES = 200
"""Ports that are tried at random before the address itself is doubted."""
_chance = random.SystemRandom()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. (Another program may take it a moment later.)"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not count
        try:
            probe.bind((host, port))
            probe.listen(1)
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


def free_ports(host: str, first: int) -> Iterator[int]:
    """Free ports from `first` upwards."""
    for port in range(first, 65536):
        if is_free(host, port):
            yield port
    raise ServiceError(f"no free port above {first} on {host}")
