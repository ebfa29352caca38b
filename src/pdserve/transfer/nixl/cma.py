"""Cross-memory attach: may this process read that one's memory? Found out by doing it, never by guessing.

Linux lets `process_vm_readv` through for processes of the same user in one PID namespace, unless Yama's
ptrace_scope forbids it; then the process to be read must permit it first. Containers of different pods never may.
"""

from __future__ import annotations

import ctypes
import sys

_PR_SET_PTRACER = 0x59616D61  # "Yama"
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _Piece(ctypes.Structure):
    """C's `struct iovec`: one piece of memory."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def allow_readers() -> None:
    """Let other processes of this user read this one's memory under Yama; without Yama there is nothing to allow."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """Whether `expected` can be read at an address of another process: permitted, and the very process meant."""
    if sys.platform != "linux":
        return False
    buffer = ctypes.create_string_buffer(len(expected))
    here = _Piece(ctypes.addressof(buffer), len(expected))
    there = _Piece(address, len(expected))
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    num_bytes = read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return bool(num_bytes == len(expected) and buffer.raw == expected)
