"""What runs on this machine: one JSON file per service in `<home>/run`, written by its supervisor alone.

The supervisor holds a lock beside it for as long as it lives, so a file that a killed supervisor left behind
is told from a running service without trusting process ids.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import msgspec

from pdserve.errors import ServiceError


class LocalProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One child, as its supervisor sees it."""

    role: str
    """The role: gateway, prefill or decode."""
    id: str
    """Worker id for workers; also the name of its log file."""
    pid: int | None
    url: str
    """Where it answers; of gateways the API, behind which there may be several."""
    metrics_url: str
    """The address that Prometheus scrapes, of this very process; /ready, /health and /debug are its neighbours."""
    state: str
    """The state: starting, ready, restarting or exited."""
    niceness: int = 0


class LocalService(msgspec.Struct, frozen=True, kw_only=True):
    """A service as one `pdserve up` runs it."""

    service: str
    url: str
    """Base URL of the API."""
    redis_url: str
    redis_pid: int | None
    """Process id of the embedded server; None when the bus was given."""
    supervisor_pid: int
    log_folder: str
    processes: list[LocalProcess]


def run_folder(home: Path) -> Path:
    """The folder in which the files lie."""
    return home / "run"


@contextmanager
def owned(home: Path, service: str) -> Iterator[Path]:
    """Hold the service's name while it runs; gives the file to `write`, which is gone afterwards.

    Raises:
        ServiceError: it runs already, or the folder cannot be written.
    """
    file = run_folder(home) / f"{service}.json"
    with _open_lock(home, service) as lock:
        if not _take(lock):
            raise ServiceError(
                f"service {service!r} runs here already (see `pdserve status`): stop it, or give another --service"
            )
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)


def write(file: Path, service: LocalService) -> None:
    """Replace the file as a whole: a reader sees the old or the new one. Its owner's alone: URLs may hold passwords."""
    temporary = file.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(service)) + b"\n")
    os.replace(temporary, file)


def read(home: Path, service: str) -> LocalService | None:
    """What runs under this name; None when nothing does."""
    file = run_folder(home) / f"{service}.json"
    with suppress(FileNotFoundError, msgspec.DecodeError):
        if _is_held(_lock_file(home, service)):
            return msgspec.json.decode(file.read_bytes(), type=LocalService)
    return None


def read_all(home: Path) -> list[LocalService]:
    """Every service of this machine that runs."""
    found = (read(home, file.stem) for file in sorted(run_folder(home).glob("*.json")))
    return [service for service in found if service is not None]


def _lock_file(home: Path, service: str) -> Path:
    return run_folder(home) / f".{service}.lock"


def _open_lock(home: Path, service: str) -> TextIO:
    try:
        run_folder(home).mkdir(parents=True, exist_ok=True)
        return _lock_file(home, service).open("w")
    except OSError as error:
        raise ServiceError(
            f"{run_folder(home)} cannot be written ({error.strerror}): set PDS_HOME to a folder that can"
        ) from error


def _take(lock: TextIO) -> bool:
    """Tries for a moment: `_is_held` of another process holds the lock for microseconds."""
    for _ in range(10):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def _is_held(file: Path) -> bool:
    with file.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
