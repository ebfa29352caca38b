"""A network of its own for a whole cluster: a namespace without a way out, and a bridge that pods are plugged into."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BRIDGE = "pds0"
NODE_IP = "10.88.0.1"
POD_NETWORK = "10.88.0.0/16"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextmanager
def private_network() -> Iterator[None]:
    """Until the end of the block this thread, and all it starts, live in a new network namespace."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    assert _libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    try:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{NODE_IP}/16", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        yield
    finally:
        assert _libc.setns(before, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(before)
