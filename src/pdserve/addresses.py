"""Addresses of this machine: bind a TCP socket, hold its port for another process, and tell where peers reach it.

A port that is reserved is bound and does not listen: no other program takes it, and connections are refused until the
process that it was passed to listens.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

_SOCKETS = "PDSERVE_SOCKETS"
"""The variable by which a starter names the sockets that it passes on: SETTING=FD, comma separated."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A TCP socket bound to the first address of `host` that this machine has; "" and `::` are all of both families.

    Raises:
        OSError: the port is in use, or the host is none of this machine's.
    """
    rows = socket.getaddrinfo(host or "::", port, type=socket.SOCK_STREAM)
    if is_wildcard(host) and rows[0][0] == socket.AF_INET6:  # a machine without IPv6 has still all of its addresses
        rows += socket.getaddrinfo("0.0.0.0", port, type=socket.SOCK_STREAM)  # noqa: S104
    for index, (family, _, _, _, address) in enumerate(rows):
        try:
            return _bind_one(family, address, is_shared=is_shared)
        except OSError as error:
            if error.errno == errno.EADDRINUSE or index == len(rows) - 1:
                raise
    raise AssertionError("getaddrinfo gives an address or raises")


def _bind_one(family: int, address: tuple[object, ...], *, is_shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def hold(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket that keeps every other program from this port and is to be passed on; it does not listen.

    Args:
        host: where its process will listen.
        port: its number, never 0: the kernel takes back what it chose when such a socket does not listen any more.
        is_shared: further sockets of ours may hold the same port; the first one is not shared when it is bound.

    Raises:
        OSError: the port is in use, or the host is none of this machine's.
    """
    assert port, "a port that is held has a number"
    sock = bind(host, port, is_shared=is_shared)
    try:
        sock.listen()  # two may bind, but one alone can listen
    except BaseException:
        sock.close()
        raise
    stop_listening(sock)
    return sock


def stop_listening(sock: socket.socket) -> None:
    """Hold the port only: its process has died, and clients shall be refused until the next one listens.

    Harmless for a socket that does not listen: shutting that down would leave all its later connections unreadable.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.shutdown(socket.SHUT_RD)


def listen_on(sock: socket.socket, backlog: int) -> socket.socket:
    """Let a bound or held socket listen."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a predecessor do not count
    sock.listen(backlog)
    sock.setblocking(False)
    return sock


def passed_on(sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    """The environment of a process that gets these sockets, by the setting that names their port."""
    return {_SOCKETS: ",".join(f"{name}={sock.fileno()}" for name, sock in sockets.items())} if sockets else {}


def take_passed(setting: str) -> socket.socket | None:
    """The socket that our starter holds for this setting's port; None when it passed none."""
    pairs = dict(pair.split("=") for pair in os.environ.get(_SOCKETS, "").split(",") if pair)
    if setting not in pairs:
        return None
    return socket.socket(fileno=os.dup(int(pairs[setting])))


def is_wildcard(host: str) -> bool:
    """Whether a server listens on every address of this machine there."""
    try:
        return host == "" or socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)[0][4][0] in ("0.0.0.0", "::")  # noqa: S104
    except OSError:
        return False


def peer_host(host: str, *, is_same_machine: bool = False) -> str:
    """An address to connect to, for one to listen on: of a wildcard this machine's own, as the default route has it.

    Args:
        is_same_machine: loopback is enough.
    """
    if not is_wildcard(host):
        return host
    is_v6_wanted = host == "" or ":" in host
    if is_same_machine:
        return "127.0.0.1" if not is_v6_wanted or not _has_address("::1") else "::1"
    return _own_address(is_v6_wanted) or ("::1" if is_v6_wanted and _has_address("::1") else "127.0.0.1")


def _own_address(is_v6_wanted: bool) -> str | None:
    """IPv4 first, which every peer of a machine with both understands; IPv6 where it is all there is."""
    families = [socket.AF_INET, socket.AF_INET6] if is_v6_wanted else [socket.AF_INET]
    for find in (_routed, _of_an_interface):
        for family in families:
            if (address := find(family)) is not None:
                return address
    return None


def _routed(family: socket.AddressFamily) -> str | None:
    """The address that connections leave by; connecting a datagram socket sends nothing."""
    documentation = "192.0.2.254" if family == socket.AF_INET else "2001:db8::1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((documentation, 9))
        address = str(probe.getsockname()[0])
        return address if _is_global(address) else None
    return None


def _of_an_interface(family: socket.AddressFamily) -> str | None:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    rows = (row for name, rows in psutil.net_if_addrs().items() if name in up for row in rows if row.family == family)
    return next((row.address for row in rows if _is_global(row.address)), None)


def _is_global(address: str) -> bool:
    if "%" in address:
        return False
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def _has_address(address: str) -> bool:
    try:
        bind(address, 0).close()
    except OSError:
        return False
    return True
