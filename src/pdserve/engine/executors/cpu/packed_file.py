"""Packed weights in a file that all workers of a machine map: packed once, in memory once. Never reads a model.

A copy of one's own is faster, because only private memory gets huge pages (a few per cent of a decode step), so the
file is used where copies would crowd the memory, or on demand. It is complete from its first appearance: written
under another name, then renamed. One worker packs, the others wait. Its name tells apart everything that its
content depends on; an older one of the same model is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdserve.log import get_logger
from pdserve.models.weight_files import find_weights

logger = get_logger(__name__)

_LAYOUT_VERSION = 1
"""Raise it when the same weights are packed into other bytes."""
_MAX_SHARE = 0.25
"""Share of the available memory: a larger copy is shared, so that three workers still fit."""


@dataclass(frozen=True, slots=True)
class PackedMemory:
    """Where packed weights lie."""

    address: int
    num_bytes: int
    is_filled: bool
    """Whether the weights are there already, and must not be written."""
    owner: object
    """Keeps the memory alive."""


@dataclass(frozen=True, slots=True)
class WeightSharing:
    """Whether and where weights are shared."""

    mode: str
    """One of auto, on and off (setting SHARE_WEIGHTS)."""
    folder: Path
    available_bytes: int
    """Memory that this process could still take."""

    def is_wanted(self, num_bytes: int) -> bool:
        """Whether weights of this size are shared."""
        return self.mode == "on" or (self.mode == "auto" and num_bytes > _MAX_SHARE * self.available_bytes)


def file_name(model_path: Path, fingerprint: str, *parts: object) -> str:
    """Name of the packed file: the model's, and a digest of all that its bytes depend on.

    Args:
        fingerprint: of the model; it samples large weight files, so their times count too.
        parts: type and layout of the packed weights.
    """
    stats = [file.stat() for file in find_weights(model_path).files]
    times = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    key = repr((_LAYOUT_VERSION, sys.byteorder, fingerprint, times, parts))
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"{_stem(model_path, parts)}-{digest}.packed"


def open_or_pack(file: Path, num_bytes: int, pack: Callable[[PackedMemory], object]) -> PackedMemory:
    """Map the file; when it is missing, have it packed first, by one process of this machine.

    Args:
        file: as named by `file_name`.
        num_bytes: its size.
        pack: fills zeroed memory of this size.

    Raises:
        OSError: no room on the disk, or no access.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _lock(file.with_suffix(".lock")):
        if not file.exists() or file.stat().st_size != num_bytes:
            _make(file, num_bytes, pack)
    with file.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), num_bytes, access=mmap.ACCESS_READ)
    return _memory(mapping, num_bytes, is_filled=True)


def _make(file: Path, num_bytes: int, pack: Callable[[PackedMemory], object]) -> None:
    logger.info("packing the weights into %s (%d MiB)", file, num_bytes >> 20)
    unfinished = file.with_suffix(".part")
    with unfinished.open("wb+") as stream:
        os.posix_fallocate(stream.fileno(), 0, num_bytes)  # a full disk is an error here, and a signal while packing
        mapping = mmap.mmap(stream.fileno(), num_bytes)
        pack(_memory(mapping, num_bytes, is_filled=False))
        mapping.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)
    stem = file.name.rpartition("-")[0]
    for older in file.parent.glob(f"{stem}-*.packed"):
        if older != file:
            older.unlink(missing_ok=True)  # a process that maps it keeps it


def _memory(mapping: mmap.mmap, num_bytes: int, *, is_filled: bool) -> PackedMemory:
    view = np.frombuffer(mapping, dtype=np.uint8)
    return PackedMemory(view.ctypes.data, num_bytes, is_filled, view)


def _stem(model_path: Path, parts: tuple[object, ...]) -> str:
    return "-".join([model_path.resolve().name, *(str(part).replace("torch.", "") for part in parts[:1])])


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released with the file, also by a process that dies
        yield
