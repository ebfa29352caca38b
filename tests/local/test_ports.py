"""Free ports, and a clear word about taken ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pdserve.errors import ServiceError
from pdserve.local.ports import check_free, free_ports, is_free


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
    ports = free_ports("127.0.0.1", taken_port)
    first, second = next(ports), next(ports)
    assert taken_port < first < second


def test_no_free_port_is_an_error() -> None:
    with pytest.raises(ServiceError, match="no free port"):
        list(free_ports("203.0.113.1", 65530))  # not an address of this machine: nothing can be bound
