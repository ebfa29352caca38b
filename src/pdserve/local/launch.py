"""The shim in front of a child's command (`PARENT_PID NICE COMMAND…`): become COMMAND, and die when the parent does.

A shim that replaces itself, because code between fork and exec is unsafe in a process with threads. The kernel sends
SIGKILL when the *thread* that started this process ends, so start it from one that lives as long. COMMAND gets a
process group of its own: Ctrl-C in a terminal reaches the parent alone, which decides in which order things end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def shim(niceness: int = 0) -> list[str]:
    """The words in front of a command that this process starts; imports nothing but this file (some milliseconds)."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(niceness)]


def launch(parent_pid: int, niceness: int, command: list[str]) -> None:
    """Replace this process by `command`; exits with status 1 when the parent has died meanwhile."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        raise SystemExit(1)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    if niceness:
        os.nice(niceness)
    os.execvp(command[0], command)  # noqa: S606  there is nothing for a shell to do


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
