"""`python -m pdserve.local.launch PARENT_PID NICE COMMAND…`: become COMMAND, and die when the parent does.

A shim that replaces itself, because the preexec_fn of `subprocess.Popen` is unsafe in a process with threads. The
kernel sends SIGKILL when the *thread* that started this process ends, so start it from one that lives as long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def launch(parent_pid: int, niceness: int, command: list[str]) -> None:
    """Never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        raise SystemExit(1)
    if niceness:
        os.nice(niceness)
    os.execvp(command[0], command)  # noqa: S606  there is nothing for a shell to do


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
