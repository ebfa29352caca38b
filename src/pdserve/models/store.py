"""The folder of models that pdserve made itself: each is built once, whole or not at all, by one process.

Two processes that want the same model meet at a file lock; the second finds the first one's result. A build
goes to a neighbour folder that is renamed at its end, so that a crash leaves no half model behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.errors import ModelError


def build_once(
    folder: Path, module: str, arguments: list[str], progress: Callable[[str], None], *, num_bytes: Callable[[], int]
) -> Path:
    """Return `folder`, first made by `python -m module *arguments FOLDER` when it is not there yet.

    Args:
        folder: final place; its parents are made.
        module: builder; runs in a process of its own, so that torch never enters the caller.
        arguments: put before the folder's path.
        progress: called with each line the builder prints.
        num_bytes: tells how much is going to be written; asked only before a build.

    Raises:
        ModelError: the disk is too small, the builder failed (its words are in a log beside the folder), or the folder
            cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"{folder.parent} cannot be made ({error.strerror}): set PDS_HOME to a folder that can be written"
        ) from error
    with _locked(folder.with_name(f".{folder.name}.lock"), progress):
        if folder.is_dir():
            return folder
        building = folder.with_name(f".{folder.name}.building")
        shutil.rmtree(building, ignore_errors=True)  # of a build that crashed
        check_space(folder.parent, num_bytes(), f"making {folder.name}")
        try:
            _run(module, [*arguments, str(building)], progress, folder.with_name(f"{folder.name}.log"))
            building.rename(folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return folder


def check_space(folder: Path, num_bytes: int, purpose: str) -> None:
    """Refuse what does not fit on the disk, before it begins.

    Raises:
        ModelError: the disk of `folder` has less free space than `purpose` needs.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        raise ModelError(
            f"{purpose} needs {_mib(num_bytes)} and {folder} has {_mib(free_bytes)} free: make room there, or set "
            "PDS_HOME to a folder on a larger disk"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


@contextmanager
def _locked(file: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """The kernel drops the lock with its process, however that ends."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is making this model; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _run(module: str, arguments: list[str], progress: Callable[[str], None], log_file: Path) -> None:
    """Run a builder in front of which the shim of local/launch.py lets it die with this process.

    One that outlived its starter would write beside the next one. The shim is named here and not imported: local/ is
    a layer above models/.
    """
    shim = [sys.executable, "-P", "-m", "pdserve.local.launch", str(os.getpid()), "0"]
    last_line = ""
    with (
        log_file.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            [*shim, sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "PYTHONSAFEPATH": "1"},
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                log.write(line)
                last_line = line.strip() or last_line
                if not line.startswith((" ", "Traceback")):  # a failure's stack goes into the error alone
                    progress(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        source = f" out of {arguments[0]}" if len(arguments) > 1 else ""
        raise ModelError(
            f"making the model{source} failed ({last_line[:300] or 'the builder said nothing'}): see whether the file "
            f"is complete and of a supported architecture; all that was said is in {log_file}"
        )
    log_file.unlink(missing_ok=True)
