"""Starts prefill workers' passive sides, each a process of its own, in a fraction of what importing torch takes.

`peer_nursery.py SOCKET` listens on a Unix socket. For each connection it forks a peer, which takes one line of
JSON options, answers its process id and its descriptor in hex, and then obeys one JSON command per line. Options
with a peer's descriptor ask for a reader instead, which answers what it found. A process ends with its connection,
the nursery with its stdin.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
from connecting import wait_connected

from pdserve.transfer.base import Descriptor
from pdserve.transfer.choose import choose_backend
from pdserve.transfer.descriptor import decode_descriptor, encode_descriptor
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.tcp.transport import TcpTransport

TCP_ONLY = Descriptor(
    backend="tcp", worker_id="w", generation="g", num_blocks=1, block_bytes=8, kv_signature="", payload=b""
)


def serve_forever(path: str) -> None:
    if sys.platform == "linux":
        importlib.import_module("nixl._api")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the peers
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            be_what_is_asked_for(connection)
            os._exit(0)
        connection.close()


def be_what_is_asked_for(connection: socket.socket) -> None:
    lines, answers = connection.makefile("r"), connection.makefile("w")

    def answer(text: object) -> None:
        print(text, file=answers, flush=True)

    options = json.loads(lines.readline())
    os.environ.update(options["env"])
    answer(os.getpid())
    if "peer_descriptor" in options:
        answer(json.dumps(give_up_a_read_from_a_frozen_peer(**options)))
    else:
        be_a_peer(options, lines, answer)


def give_up_a_read_from_a_frozen_peer(
    peer_descriptor: str, peer_pid: int, peer_process_nonce: str, kv_signature: str, teardown: str, **_: object
) -> dict[str, object]:
    """A reader gives a READ up, and reuses its blocks when they are free by our own rules."""
    peer = decode_descriptor(bytes.fromhex(peer_descriptor))
    blocks = torch.zeros((peer.num_blocks, peer.block_bytes), dtype=torch.uint8)
    transport = NixlTransport()
    own = transport.register(blocks, "d-1", "g1", kv_signature)
    wait_connected(transport, peer)
    os.kill(peer_pid, signal.SIGSTOP)
    ids = list(range(peer.num_blocks))
    transport.pull(peer.peer, peer_process_nonce, ids, ids, time.monotonic() + 60)
    (handle,) = transport._reads
    was_terminal_at_once = transport.abort(handle)
    if teardown == "none":
        os.kill(peer_pid, signal.SIGCONT)
        until_s = time.monotonic() + 10
        while not was_terminal_at_once and time.monotonic() < until_s:
            if any(result.is_terminal for result in transport.poll()):
                break
    else:
        getattr(transport, teardown)()
    blocks.fill_(0x55)
    os.kill(peer_pid, signal.SIGCONT)
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        if teardown != "close":
            transport.poll()  # whatever an agent still has to write, it writes when it makes progress
        time.sleep(0.001)
    return {
        "was_terminal_at_once": was_terminal_at_once,
        "num_changed_bytes": int((blocks != 0x55).sum()),
        "auto": list(choose_backend("auto", [own, TCP_ONLY], [peer, TCP_ONLY])),
    }


def be_a_peer(options: dict[str, Any], lines: TextIO, answer: Callable[[object], None]) -> None:
    generator = torch.Generator().manual_seed(options["seed"])
    shape = (options["num_blocks"], options["block_bytes"])
    kv_cache = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    transport = NixlTransport() if options["backend"] == "nixl" else TcpTransport(port=options["port"])
    descriptor = transport.register(kv_cache, options["worker_id"], options["generation"], options["kv_signature"])
    answer(encode_descriptor(descriptor).hex())
    is_over = threading.Event()

    def obey() -> None:
        for line in lines:
            command, *arguments = json.loads(line)
            if command == "fill":
                kv_cache[arguments[0]] = arguments[1]
            else:
                getattr(transport, command)(*arguments)
            answer("ok")
        is_over.set()

    threading.Thread(target=obey, daemon=True).start()
    while not is_over.is_set():
        transport.serve()
        time.sleep(0.001)
    transport.close()


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    watcher = threading.Thread(target=end_with_stdin, daemon=True)
    watcher.start()
    serve_forever(sys.argv[1])
