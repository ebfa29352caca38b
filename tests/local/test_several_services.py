"""Services that start in the same moment all serve, each with processes and ports of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from pdserve.local.service_file import LocalService, read
from pdserve.readiness import read_readiness

pytestmark = pytest.mark.usefixtures("one_up_at_a_time")


class Starting:
    """One `pdserve up` and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.is_ready = False
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("Ready"):
                self.is_ready = True
                return


@contextmanager
def starting(home: Path, model: Path, number: int, folder: Path, *more: str) -> Iterator[Starting]:
    command = [sys.executable, "-P", "-m", "pdserve", "up", f"--model={model}", "--port=0", f"--service=s{number}"]
    with subprocess.Popen(
        [*command, "--num-blocks=64", "--threads=1", *more],
        env={**os.environ, "PDS_HOME": str(home)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Starting(process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def start_together(home: Path, model: Path, num: int, folder: Path) -> list[LocalService]:
    """Start, ask each for an answer, and give what each said of itself while all ran."""
    with ExitStack() as stack:
        services = [stack.enter_context(starting(home, model, number, folder)) for number in range(num)]
        for service in services:
            service.reader.join(150)
            assert service.is_ready, service.lines
            assert not any("starting again" in line for line in service.lines), service.lines
        found = [read(home, f"s{number}") for number in range(num)]
        running = [service for service in found if service is not None]
        assert len(running) == num
        for service in running:
            body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 4
            for process in service.processes:
                told = read_readiness(httpx.get(process.metrics_url.replace("/metrics", "/ready"), timeout=20).content)
                assert told.pid == process.pid
                assert told.generation
        return running


def test_two_services_that_start_at_once_both_serve(tmp_path: Path, tiny_model_dir: Path) -> None:
    services = start_together(tmp_path, tiny_model_dir, 2, tmp_path)
    urls = [process.metrics_url for service in services for process in service.processes]
    assert len(set(urls)) == len(urls)


def test_five_services_that_start_at_once_all_serve(tmp_path: Path, tiny_model_dir: Path) -> None:
    assert len(start_together(tmp_path, tiny_model_dir, 5, tmp_path)) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which needs root")
def test_a_service_whose_disk_is_too_small_says_so_before_it_works(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pdserve", "up", "--model=tiny", "--port=0"],
            env={**os.environ, "PDS_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert re.match(
            r"pdserve up: making tiny-\w+ needs 4.0 MiB and .* has [01]\.\d MiB free: make room there", last
        )
        assert not list((tmp_path / "models").glob("tiny*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


NAMES = ("http", "redis", "token", "json", "torch", "asyncio", "operator", "socket", "signal", "tokenizers", "pdserve")


def test_files_in_the_current_folder_are_never_imported(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = tmp_path / "current"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    start_together(tmp_path, tiny_model_dir, 1, folder)


@pytest.mark.parametrize(
    "host", ["::", pytest.param("0.0.0.0", marks=pytest.mark.slow), pytest.param("::1", marks=pytest.mark.slow)]
)
def test_workers_on_every_address_exchange_blocks_over_tcp(tmp_path: Path, tiny_model_dir: Path, host: str) -> None:
    words = "the of and to in is you that it he was for on are as with his they be at one have this from or had by"
    with starting(tmp_path, tiny_model_dir, 0, tmp_path, f"--host={host}", "--transport=tcp") as up:
        up.reader.join(150)
        assert up.is_ready, up.lines
        service = read(tmp_path, "s0")
        assert service is not None
        body = {"prompt": words, "max_tokens": 5, "temperature": 0}
        httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).raise_for_status()
        (decode,) = (process for process in service.processes if process.role == "decode")
        assert 'pd_kv_transfers_total{backend="tcp",result="ok"} 1.0' in httpx.get(decode.metrics_url).text
