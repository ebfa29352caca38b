"""Starts prefill workers' passive sides, each a process of its own, in a fraction of what importing torch takes.

`peer_nursery.py SOCKET` listens on a Unix socket. For each connection it forks a peer, which takes one line of
JSON options, answers its process id and its descriptor in hex, and then obeys one JSON command per line. A peer
ends with its connection, the nursery with its stdin.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time

import torch

from pdserve.transfer.descriptor import encode_descriptor
from pdserve.transfer.nixl import NixlTransport
from pdserve.transfer.tcp import TcpTransport


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
            be_a_peer(connection)
            os._exit(0)
        connection.close()


def be_a_peer(connection: socket.socket) -> None:
    lines, answers = connection.makefile("r"), connection.makefile("w")

    def answer(text: object) -> None:
        print(text, file=answers, flush=True)

    options = json.loads(lines.readline())
    os.environ.update(options["env"])
    answer(os.getpid())
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
