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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.errors import ModelError


def build_once(folder: Path, module: str, arguments: list[str], progress: Callable[[str], None]) -> Path:
    """Return `folder`, first made by `python -m module *arguments FOLDER` when it is not there yet.

    Args:
        folder: final place; its parents are made.
        module: builder; runs in a process of its own, so that torch never enters the caller.
        arguments: put before the folder's path.
        progress: called with each line the builder prints.

    Raises:
        ModelError: the builder failed (the message ends with its last lines), or the folder cannot be written.
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
        _run(module, [*arguments, str(building)], progress)
        building.rename(folder)
    return folder


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


def _run(module: str, arguments: list[str], progress: Callable[[str], None]) -> None:
    """Run a builder in front of which the shim of local/launch.py lets it die with this process.

    One that outlived its starter would write beside the next one. The shim is named here and not imported: local/ is
    a layer above models/.
    """
    shim = [sys.executable, "-P", "-m", "pdserve.local.launch", str(os.getpid()), "0"]
    last_lines: deque[str] = deque(maxlen=5)
    with subprocess.Popen(
        [*shim, sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "PYTHONSAFEPATH": "1"},
    ) as process:
        try:
            for line in process.stdout or ():
                last_lines.append(line.strip())
                if not line.startswith((" ", "Traceback")):  # a failure's stack goes into the error alone
                    progress(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ModelError(f"making the model failed ({module} {' '.join(arguments)}): " + " | ".join(last_lines))
