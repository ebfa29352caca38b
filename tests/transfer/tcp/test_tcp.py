"""What only the tcp backend promises: authenticated, bounded, and not impressed by nonsense."""

import os
import random
import socket
import struct
import threading
import time

import msgspec
import pytest
import torch
from connecting import wait_connected

from pdserve.errors import TransferError
from pdserve.transfer.base import Descriptor, PullState
from pdserve.transfer.tcp.grants import Grants
from pdserve.transfer.tcp.transport import TcpTransport
from pdserve.transfer.tcp.wire import Answer, Hello, Read, TcpPayload, receive_frame, send_frame

SIGNATURE = "model=tiny"
BLOCK_BYTES = 4096


class Pair:
    """A serving and a reading transport in this process."""

    def __init__(self, **server_options):
        self.remote = torch.randint(0, 256, (16, BLOCK_BYTES), dtype=torch.uint8)
        self.local = torch.zeros((16, BLOCK_BYTES), dtype=torch.uint8)
        self.server, self.reader = TcpTransport(**server_options), TcpTransport(connect_timeout_s=0.5)
        self.descriptor: Descriptor = self.server.register(self.remote, "p-1", "g1", SIGNATURE)
        self.reader.register(self.local, "d-1", "g1", SIGNATURE)

    def read(self, nonce, remote_ids, local_ids, within_s=5.0):
        deadline_s = time.monotonic() + within_s
        wait_connected(self.reader, self.descriptor)
        handle = self.reader.pull(self.descriptor.peer, nonce, remote_ids, local_ids, deadline_s)
        while time.monotonic() < deadline_s + 1:
            for result in self.reader.poll():
                assert result.handle == handle
                return result
            time.sleep(0.0005)
        raise AssertionError("the READ did not end")

    @property
    def address(self):
        payload = msgspec.msgpack.decode(self.descriptor.payload, type=TcpPayload)
        return payload.host, payload.port

    def dial(self):
        connection = socket.create_connection(self.address, timeout=5)
        try:
            send_frame(connection, Hello(worker_id="p-1", generation="g1", kv_signature=SIGNATURE))
            assert receive_frame(connection, Answer).reason == ""
        except OSError:
            connection.close()
            raise
        return connection

    def close(self):
        self.reader.close()
        self.server.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def test_blocks_are_read_with_their_hand_offs_nonce_only(pair):
    pair.server.expect("right", [1, 2, 3])
    assert pair.read("right", [1, 3], [0, 1]).state is PullState.DONE
    assert torch.equal(pair.local[:2], pair.remote[[1, 3]])
    pair.local.zero_()
    for nonce in ("wrong", "", "right ", "RIGHT", "x" * 1000):
        assert pair.read(nonce, [1], [5]).reason == "nonce"
    assert not pair.local.any()


def test_a_nonce_opens_its_own_blocks_and_no_other(pair):
    pair.server.expect("a", [1])
    pair.server.expect("b", [2])
    assert pair.read("a", [2], [0]).reason == "lookup"
    assert pair.read("a", [1, 2], [0, 1]).reason == "lookup"
    pair.server.expect("a", [2])
    assert pair.read("a", [1, 2], [0, 1]).state is PullState.DONE


def test_a_forgotten_nonce_reads_nothing(pair):
    pair.server.expect("a", [1])
    pair.server.forget("a")
    pair.server.forget("never known")
    assert pair.read("a", [1], [0]).reason == "nonce"
    assert not pair.local.any()


def test_blocks_given_away_while_they_were_sent_are_not_taken_for_good():
    size = 64 << 20
    remote, server = torch.ones((1, size), dtype=torch.uint8), TcpTransport()
    descriptor = server.register(remote, "p-1", "g1", SIGNATURE)
    payload = msgspec.msgpack.decode(descriptor.payload, type=TcpPayload)
    server.expect("a", [0])
    with socket.create_connection((payload.host, payload.port), timeout=5) as connection:
        send_frame(connection, Hello(worker_id="p-1", generation="g1", kv_signature=SIGNATURE))
        receive_frame(connection, Answer)
        send_frame(connection, Read(nonce="a", block_ids=[0]))
        assert receive_frame(connection, Answer).num_bytes == size
        server.forget("a")  # the sender is stuck in the middle of the block: nobody takes it
        received = 0
        while received < size:
            received += len(connection.recv(min(1 << 20, size - received)))
        assert receive_frame(connection, Answer).reason == "nonce"
    server.close()


def test_restart_on_the_same_port_is_told_by_the_generation(pair):
    pair.server.expect("a", [1])
    assert pair.read("a", [1], [0]).state is PullState.DONE
    pair.server.close()
    successor = TcpTransport(port=pair.address[1])
    successor.register(pair.remote, "p-1", "g2", SIGNATURE)
    successor.expect("a", [1])
    assert pair.read("a", [1], [1]).reason == "generation"
    assert not pair.local[1].any()
    successor.close()


def test_a_kept_connection_that_the_peer_closed_is_replaced(pair):
    pair.server.expect("a", [1])
    assert pair.read("a", [1], [0]).state is PullState.DONE
    for connection in list(pair.server._server._connections):
        connection.shutdown(socket.SHUT_RDWR)
    assert pair.read("a", [1], [2]).state is PullState.DONE
    assert torch.equal(pair.local[2], pair.remote[1])


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack(">I", 0),
        random.Random(0).randbytes(4096),
    ],
)
def test_nonsense_is_hung_up_on_and_others_are_served(pair, nonsense):
    pair.server.expect("a", [1])
    with socket.create_connection(pair.address, timeout=5) as stranger:
        stranger.sendall(nonsense)
        received = b""
        try:
            while chunk := stranger.recv(4096):
                received += chunk
        except ConnectionResetError:
            pass
        assert len(received) < 500, "a stranger gets a short refusal at most"
    assert pair.read("a", [1], [0]).state is PullState.DONE


@pytest.mark.parametrize("block_ids", [[-1], [16], [2**40], list(range(100_000))])
def test_impossible_block_ids_are_refused(pair, block_ids):
    pair.server.expect("a", [1])
    with pair.dial() as connection:
        send_frame(connection, Read(nonce="a", block_ids=block_ids))
        assert receive_frame(connection, Answer).reason == "lookup"


def test_a_reader_that_takes_nothing_does_not_hold_up_others(pair):
    pair.server.expect("a", list(range(16)))
    lazy = [pair.dial() for _ in range(5)]
    for connection in lazy:
        send_frame(connection, Read(nonce="a", block_ids=[0] * 5000))
    assert pair.read("a", [1], [0]).state is PullState.DONE
    for connection in lazy:
        connection.close()


def test_connections_beyond_the_bound_are_hung_up_on():
    pair = Pair()
    pair.server._server._max_connections = 3
    kept = [pair.dial() for _ in range(3)]
    with pytest.raises(OSError):  # noqa: PT011 (reset or ended, as the system likes)
        pair.dial()
    for connection in kept:
        connection.close()
    pair.close()


def test_a_busy_port_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        transport = TcpTransport(port=port)
        with pytest.raises(TransferError, match=f"TRANSFER_PORT {port}"):
            transport.register(torch.zeros((1, 8)), "p-1", "g1", SIGNATURE)


def test_advertised_address_goes_into_the_descriptor():
    transport = TcpTransport(host="0.0.0.0", advertise_host="10.1.2.3")
    descriptor = transport.register(torch.zeros((1, 8)), "p-1", "g1", SIGNATURE)
    assert msgspec.msgpack.decode(descriptor.payload, type=TcpPayload).host == "10.1.2.3"
    transport.close()


def test_closing_leaves_no_thread_and_no_file_behind():
    def count():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(10):
        pair = Pair()
        pair.server.expect("a", [1])
        assert pair.read("a", [1], [0]).state is PullState.DONE
        pair.close()
    until_s = time.monotonic() + 5
    while count() > before and time.monotonic() < until_s:
        time.sleep(0.01)
    threads, files = count()
    assert threads <= before[0]
    assert files <= before[1]


def test_grants_tell_apart_unknown_nonces_and_foreign_blocks():
    grants = Grants()
    grants.allow("a", [1, 2])
    assert grants.refusal("a", [1]) is None
    assert grants.refusal("a", [3]) == "lookup"
    assert grants.refusal("b", [1]) == "nonce"
    assert grants.refusal("", [1]) == "nonce"
    grants.forget("a")
    assert grants.refusal("a", [1]) == "nonce"
