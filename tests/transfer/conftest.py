"""Real second processes to READ from."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from pdserve.registration import WorkerRef
from pdserve.transfer.base import Descriptor, PullResult, Transport
from pdserve.transfer.descriptor import decode_descriptor
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.tcp.transport import TcpTransport

sys.path.insert(0, str(Path(__file__).parent))  # connecting.py, stubborn.py

SIGNATURE = "model=tiny;kv_dtype=float32;block_size=16"
BLOCK_BYTES = 64 * 1024
NUM_PEER_BLOCKS = 48
NUM_LOCAL_BLOCKS = 64
NONCE = "nonce-of-a-hand-off"


class PeerProcess:
    """A peer, its descriptor, and what its blocks hold."""

    def __init__(
        self, nursery: str, backend: str, seed: int, env: dict[str, str] | None = None, **changes: object
    ) -> None:
        self.options = {
            "backend": backend,
            "seed": seed,
            "worker_id": f"p-{seed}",
            "generation": "g1",
            "kv_signature": SIGNATURE,
            "num_blocks": NUM_PEER_BLOCKS,
            "block_bytes": BLOCK_BYTES,
            "port": 0,
            "env": env or {},
        } | changes
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(nursery)
            self._lines, self._words = connection.makefile("r"), connection.makefile("w")
        self.say(self.options)
        self.pid = int(self._lines.readline())
        self._descriptor: Descriptor | None = None
        generator = torch.Generator().manual_seed(seed)
        shape = (self.options["num_blocks"], self.options["block_bytes"])
        self.blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def say(self, what: object) -> None:
        print(json.dumps(what), file=self._words, flush=True)

    @property
    def descriptor(self) -> Descriptor:
        """Waits until the peer has started."""
        if self._descriptor is None:
            self._descriptor = decode_descriptor(bytes.fromhex(self._lines.readline()))
        return self._descriptor

    @property
    def peer(self) -> WorkerRef:
        return self.descriptor.peer

    @property
    def is_alive(self) -> bool:
        return psutil.pid_exists(self.pid)

    def command(self, *words: object) -> None:
        self.say(words)
        assert self._lines.readline() == "ok\n"

    def expect_all(self) -> PeerProcess:
        assert self.descriptor
        self.command("expect", NONCE, list(range(self.options["num_blocks"])))
        return self

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
        while self.is_alive:
            time.sleep(0.001)

    def end(self) -> None:
        self.kill()
        self._lines.close()
        with contextlib.suppress(OSError):
            self._words.close()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Unix socket of the process that starts peers."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "peer_nursery.py"), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.stdin.close()


@pytest.fixture(params=["nixl", "tcp"], scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl" and sys.platform != "linux":
        pytest.skip("NIXL exists for Linux")
    return request.param


@pytest.fixture
def spawn_peer(nursery: str, backend: str) -> Iterator[Callable[..., PeerProcess]]:
    """Start a peer of the backend under test; it ends with the test."""
    peers: list[PeerProcess] = []

    def spawn(seed: int = 2, **changes: object) -> PeerProcess:
        peers.append(PeerProcess(nursery, backend, seed, **changes))
        return peers[-1]

    yield spawn
    for peer in peers:
        peer.end()


@pytest.fixture(scope="session")
def peer(nursery: str, backend: str) -> Iterator[PeerProcess]:
    """A healthy peer; every block may be read with NONCE. Tests leave it as it is."""
    peer = PeerProcess(nursery, backend, seed=1)
    peer.expect_all()
    yield peer
    peer.end()


class LocalSide:
    """This process as a decode worker: a KV cache full of 0xAA and a transport."""

    def __init__(self, backend: str, num_blocks: int = NUM_LOCAL_BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        self.blocks = torch.full((num_blocks, block_bytes), 0xAA, dtype=torch.uint8)
        self.transport: Transport = (
            NixlTransport(connect_timeout_s=0.5) if backend == "nixl" else TcpTransport(connect_timeout_s=0.5)
        )
        self._results: defaultdict[int, deque[PullResult]] = defaultdict(deque)
        self.descriptor = self.transport.register(self.blocks, "d-1", "g1", SIGNATURE)

    def pull(
        self, peer: WorkerRef, remote_ids: list[int], local_ids: list[int], *, nonce: str = NONCE, within_s: float = 5.0
    ) -> int:
        return self.transport.pull(peer, nonce, remote_ids, local_ids, time.monotonic() + within_s)

    def wait(self, *handles: int, timeout_s: float = 10.0) -> dict[int, PullResult]:
        """The next result of each of these READs; others are kept for later."""
        until_s = time.monotonic() + timeout_s
        while not all(self._results[handle] for handle in handles):
            assert time.monotonic() < until_s, f"only {dict(self._results)} of {handles} ended"
            for result in self.transport.poll():
                self._results[result.handle].append(result)
            time.sleep(0.0005)
        return {handle: self._results[handle].popleft() for handle in handles}

    def read(self, peer: PeerProcess, remote_ids: list[int], local_ids: list[int]) -> PullResult:
        handle = self.pull(peer.peer, remote_ids, local_ids)
        return self.wait(handle)[handle]


@pytest.fixture
def local(backend: str) -> Iterator[LocalSide]:
    side = LocalSide(backend)
    yield side
    side.transport.close()


@pytest.fixture
def make_local(backend: str) -> Iterator[Callable[..., LocalSide]]:
    sides: list[LocalSide] = []

    def make(**options: int) -> LocalSide:
        sides.append(LocalSide(backend, **options))
        return sides[-1]

    yield make
    for side in sides:
        side.transport.close()
