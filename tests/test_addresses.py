"""A port that is held is nobody else's, refuses connections until its process listens, and is found by its peers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.addresses import bind, hold, is_wildcard, listen_on, passed_on, peer_host, stop_listening, take_passed
from pdserve.local.ports import hold_port


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with hold_port("127.0.0.1", 0) as sock:
        yield sock


def exchange(sock: socket.socket) -> bytes:
    """What a client gets from a server on this socket that sends back what it reads."""
    with socket.create_connection(sock.getsockname()[:2]) as client:
        sock.setblocking(True)
        accepted, _ = sock.accept()
        with accepted:
            client.sendall(b"hello")
            accepted.sendall(accepted.recv(100))
        return client.recv(100)


def test_a_held_port_is_taken_and_refuses_connections(held: socket.socket) -> None:
    host, port = held.getsockname()
    with pytest.raises(OSError, match="in use"):
        hold(host, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


@pytest.mark.parametrize("num_stops", [0, 1, 2, 3])
def test_a_held_socket_serves_however_often_it_was_stopped(held: socket.socket, num_stops: int) -> None:
    for _ in range(num_stops):
        stop_listening(held)
    assert exchange(listen_on(held, 5)) == b"hello"
    stop_listening(held)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())
    assert exchange(listen_on(held, 5)) == b"hello"


def test_a_socket_is_taken_once_it_was_passed(held: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in passed_on({"PORT": held}).items():
        monkeypatch.setenv(name, value)
    taken = take_passed("PORT")
    assert taken is not None
    with taken:
        assert taken.getsockname() == held.getsockname()
    assert take_passed("METRICS_PORT") is None


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0", "::0", "0:0:0:0:0:0:0:0"])
def test_a_wildcard_is_told_by_an_address_that_answers(host: str) -> None:
    assert is_wildcard(host)
    with listen_on(bind(host, 0), 5) as sock:
        for is_same_machine in (True, False):
            told = peer_host(host, is_same_machine=is_same_machine)
            assert not is_wildcard(told)
            with socket.create_connection((told, sock.getsockname()[1]), timeout=5):
                pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "some.name.example", "10.1.2.3"])
def test_an_address_of_its_own_is_told_as_it_is(host: str) -> None:
    assert not is_wildcard(host)
    assert peer_host(host) == host


def test_a_wildcard_of_ipv6_takes_connections_of_both_families() -> None:
    with listen_on(bind("::", 0), 5) as sock:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, sock.getsockname()[1]), timeout=5):
                pass


_ALONE = """
import socket
from pdserve.addresses import bind, listen_on, peer_host
for host in ("::", ""):
    with listen_on(bind(host, 0), 5) as sock:
        told = peer_host(host)
        socket.create_connection((told, sock.getsockname()[1]), timeout=5).close()
        print(told)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for a namespace")
def test_a_machine_with_ipv6_alone_tells_its_ipv6_address() -> None:
    name = f"pds{os.getpid()}"
    run = ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "addr", "del", "127.0.0.1/8", "dev", "lo"],
            ["ip", "addr", "add", "fd00::5/128", "dev", "lo"],
        ):
            subprocess.run([*run, *command], check=True)
        done = subprocess.run([*run, sys.executable, "-c", _ALONE], capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    assert done.stdout.split() == ["fd00::5", "fd00::5"], done.stderr
