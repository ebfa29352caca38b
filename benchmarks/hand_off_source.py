"""The other process of `benchmarks.hand_off`: blocks that may be read, like a prefill worker's.

`python -m benchmarks.hand_off_source NUM_BLOCKS BLOCK_BYTES` prints one JSON line with everything a reader needs, then
answers readers until its stdin ends.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time

import torch

from pdserve.engine.executors.cpu.weights import map_memory
from pdserve.transfer.base import Transport
from pdserve.transfer.descriptor import encode_descriptor
from pdserve.transfer.digest import block_digests
from pdserve.transfer.nixl.agent import NixlAgent
from pdserve.transfer.nixl.cma import allow_readers
from pdserve.transfer.nixl.transport import NixlTransport
from pdserve.transfer.tcp.transport import TcpTransport

SIGNATURE = "benchmark"
NONCE = "nonce"
_SERVE_S = 0.001


def main() -> None:
    """Offer the blocks for reading until stdin ends."""
    num_blocks, block_bytes = map(int, sys.argv[1:])
    blocks = map_memory(num_blocks * block_bytes).view(num_blocks, block_bytes)
    blocks.random_(generator=torch.Generator().manual_seed(0))
    allow_readers()
    raw = NixlAgent(f"raw:{secrets.token_hex(4)}", progress_thread=False)
    raw.register([(blocks.data_ptr(), blocks.numel(), 0)], "DRAM")
    transports: list[Transport] = [NixlTransport(), TcpTransport()]
    descriptors = [transport.register(blocks, "source", "1", SIGNATURE) for transport in transports]
    for transport in transports:
        transport.expect(NONCE, list(range(num_blocks)))
    offer = {
        "descriptors": {d.backend: encode_descriptor(d).hex() for d in descriptors},
        "digests": [digest.hex() for digest in block_digests(blocks, list(range(num_blocks)))],
        "raw": {"name": raw.name, "metadata": raw.metadata().hex(), "address": blocks.data_ptr()},
    }
    print(json.dumps(offer), flush=True)
    is_over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    while not is_over.is_set():
        raw.make_progress()
        for transport in transports:
            transport.serve()
        time.sleep(_SERVE_S)
    raw.destroy()
    for transport in transports:
        transport.close()


if __name__ == "__main__":
    main()
