"""Free ports, and a clear word about taken ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pdserve.addresses import listen_on, peer_host, stop_listening
from pdserve.errors import ServiceError
from pdserve.local.ports import check_free, hold_port, hold_ports, is_free


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_refused_and_the_flag_named(taken_port: int) -> None:
    with pytest.raises(ServiceError, match=rf"port {taken_port} .*--port"):
        check_free("127.0.0.1", taken_port)


def test_zero_is_any_free_port() -> None:
    port = check_free("127.0.0.1", 0)
    assert port > 0
    assert is_free("127.0.0.1", port)


def test_a_free_port_is_itself() -> None:
    port = check_free("127.0.0.1", 0)
    assert check_free("127.0.0.1", port) == port


def test_free_ports_skip_taken_ones_and_rise(taken_port: int) -> None:
    ports = hold_ports("127.0.0.1", taken_port)
    with next(ports) as first, next(ports) as second:
        assert taken_port < first.getsockname()[1] < second.getsockname()[1]


def test_no_free_port_is_an_error() -> None:
    with pytest.raises(ServiceError, match="no free port"):
        list(hold_ports("203.0.113.1", 65530))  # not an address of this machine: nothing can be bound


def test_the_search_for_any_free_port_ends_on_an_address_of_another_machine() -> None:
    with pytest.raises(ServiceError, match=r"no server can listen on 203\.0\.113\.1"):
        check_free("203.0.113.1", 0)
    with pytest.raises(ServiceError, match=r"no server can listen on 203\.0\.113\.1"):
        hold_port("203.0.113.1", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "::", "0.0.0.0", ""])
def test_nobody_else_gets_a_held_port_and_nobody_can_connect_before_its_owner_listens(host: str) -> None:
    with hold_port(host, 0) as held:
        port = held.getsockname()[1]
        for _ in range(2):  # before the first process, and between two
            assert not is_free(host, port)
            with pytest.raises(ServiceError, match="is taken"):
                hold_port(host, port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((peer_host(host, is_same_machine=True), port))
            listen_on(held, 16)
            socket.create_connection((peer_host(host, is_same_machine=True), port)).close()
            stop_listening(held)
