"""A bus that does not answer at the start: one line, and an end with the reason."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.local.redis_server import find_server_binary


@pytest.fixture(scope="module")
def locked_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that wants a password."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [find_server_binary(), "--port", str(port), "--requirepass", "right", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        for line in server.stdout or ():
            if "Ready to accept connections" in line:
                break
        yield port
        server.terminate()


def start(role: str, url: str, home: Path, model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdserve", role, f"--model={model}", f"--redis-url={url}"]
    ports = ["--port=0"] if role == "gateway" else ["--metrics-port=0", "--num-blocks=64"]
    limits = ["--bus-start-timeout-s=1.5", "--bus-timeout-s=0.5", "--log-format=console"]
    environment = {**os.environ, "PDS_HOME": str(home)}
    return subprocess.run(
        [*command, *ports, *limits], capture_output=True, text=True, timeout=90, check=False, env=environment
    )


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_a_bus_that_is_not_there_ends_the_start_with_a_sentence(
    role: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    done = start(role, "redis://127.0.0.1:1", tmp_path, tiny_model_dir)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(rf"pdserve {role}: the bus connection has died: no answer within 1.5 s after the start", last)
    assert "REDIS_URL" in last
    told = [line for line in (done.stdout + done.stderr).splitlines() if "bus" in line and "pdserve-stage" not in line]
    assert sum("does not answer yet" in line for line in told) == 1
    assert len(told) <= 5, told
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://no.such.host.invalid:6379", "no.such.host.invalid"),
        ("redis://:wrong@127.0.0.1:{locked}", "WRONGPASS|invalid"),
        ("redis://127.0.0.1:{locked}", "NOAUTH|Authentication"),
        ("redis://127.0.0.1:{silent}", "did not answer within"),
        ("unix:///no/such.sock", "/no/such.sock|No such file"),
    ],
    ids=["unknown host", "wrong password", "no password", "silent", "no socket"],
)
def test_the_reason_is_in_the_sentence(
    url: str, reason: str, locked_redis: int, tmp_path: Path, tiny_model_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = url.format(locked=locked_redis, silent=silent.getsockname()[1])
        done = start("gateway", address, tmp_path, tiny_model_dir)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(reason, last), done.stderr[-2000:]
    assert "wrong@" not in done.stderr
