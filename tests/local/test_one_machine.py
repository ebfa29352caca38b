"""`pdserve up` as a user sees it: signals, state file, embedded Redis. Its children are stand-ins, the rest is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from pdserve.local.service_file import LocalService, read

pytestmark = pytest.mark.usefixtures("one_up_at_a_time")
SCRIPT = Path(__file__).parent / "up_with_stand_ins.py"


class Up:
    """A running `up`."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self.process, self.home = process, home
        self.lines: list[str] = []

    def read_until(self, start: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(start):
                return
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def rest(self) -> list[str]:
        assert self.process.stdout is not None
        self.lines += [line.strip() for line in self.process.stdout]
        self.process.wait(20)
        return self.lines

    @property
    def service(self) -> LocalService:
        service = read(self.home, "default")
        assert service is not None
        return service

    @property
    def pids(self) -> list[int]:
        service = self.service
        return [pid for pid in (service.redis_pid, *(p.pid for p in service.processes)) if pid is not None]


@contextmanager
def up(home: Path, model: Path, *arguments: str) -> Iterator[Up]:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(home), str(model), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            started = Up(process, home)
            started.read_until("READY")
            yield started
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, "the condition did not come true"
        time.sleep(0.01)


def test_ctrl_c_in_a_terminal_stops_everything_cleanly(tmp_path: Path, tiny_model_dir: Path) -> None:
    with up(tmp_path, tiny_model_dir) as running:
        pids = running.pids
        assert len(pids) == 4
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.rest()[-1] == "stopped"
        assert running.process.returncode == 0
    assert not any(map(psutil.pid_exists, pids))
    assert read(tmp_path, "default") is None
    assert not any("starting again" in line for line in running.lines)


def test_sigterm_to_the_supervisor_alone_stops_everything(tmp_path: Path, tiny_model_dir: Path) -> None:
    with up(tmp_path, tiny_model_dir) as running:
        pids = running.pids
        running.process.terminate()
        assert running.rest()[-1] == "stopped"
    assert not any(map(psutil.pid_exists, pids))


def test_children_and_redis_die_with_a_killed_supervisor(tmp_path: Path, tiny_model_dir: Path) -> None:
    with up(tmp_path, tiny_model_dir, "--stubborn") as running:
        pids = running.pids
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert read(tmp_path, "default") is None


def is_alive(pid: int) -> bool:
    """A zombie is not: whoever inherits it here may never reap it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_second_ctrl_c_kills_what_does_not_stop(tmp_path: Path, tiny_model_dir: Path) -> None:
    with up(tmp_path, tiny_model_dir, "--stubborn", "--drain-s=600") as running:
        pids = running.pids
        os.killpg(running.process.pid, signal.SIGINT)
        running.read_until("up: stopping")
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.rest()[-1] == "stopped"
    assert not any(is_alive(pid) for pid in pids)


def test_the_state_file_names_every_process(tmp_path: Path, tiny_model_dir: Path) -> None:
    with up(tmp_path, tiny_model_dir, "--prefill", "2", "--gateways", "2") as running:
        service = running.service
        rows = [(process.role, process.id, process.state) for process in service.processes]
        assert rows == [
            ("prefill", "prefill-0", "ready"),
            ("prefill", "prefill-1", "ready"),
            ("decode", "decode-0", "ready"),
            ("gateway", "gateway-0", "ready"),
            ("gateway", "gateway-1", "ready"),
        ]
        urls = [process.metrics_url for process in service.processes]
        assert len(set(urls)) == 5
        assert {process.url for process in service.processes if process.role == "gateway"} == {service.url}
        assert service.supervisor_pid == running.process.pid


def test_a_dead_redis_is_replaced_at_the_same_address(tmp_path: Path, tiny_model_dir: Path) -> None:
    with up(tmp_path, tiny_model_dir) as running:
        service = running.service
        assert service.redis_pid is not None
        os.kill(service.redis_pid, signal.SIGKILL)
        running.read_until("redis: died")
        with redis.Redis.from_url(service.redis_url) as client:
            wait_until(lambda: answers(client))


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_a_given_redis_is_used_and_left_alone(tmp_path: Path, tiny_model_dir: Path, redis_url: str) -> None:
    with up(tmp_path, tiny_model_dir, f"--redis={redis_url}") as running:
        assert running.service.redis_url == redis_url
        assert running.service.redis_pid is None
        assert all(process.id.endswith(f"-{process.role}-0") for process in running.service.processes)
        running.process.terminate()
        running.rest()
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


@pytest.mark.parametrize("argument", ["--kv-lease-s=soon", "--kv-leese-s=1"])
def test_a_bad_setting_ends_it_before_anything_starts(tmp_path: Path, tiny_model_dir: Path, argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "up", f"--model={tiny_model_dir}", argument],
        env={**os.environ, "PDS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 2
    assert "kv-leese-s" in done.stderr or "KV_LEASE_S" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_decode_rests_below_the_services_own_target_unless_told_otherwise(tmp_path: Path, tiny_model_dir: Path) -> None:
    def interval(running: Up) -> list[str]:
        flags = [flag for p in running.service.processes for flag in psutil.Process(p.pid).cmdline()]
        return [flag for flag in flags if flag.startswith("--step-interval-s")]

    with up(tmp_path / "a", tiny_model_dir, "--tpot-slo-s=0.05") as running:
        assert interval(running) == ["--step-interval-s=0.045"]
    with up(tmp_path / "b", tiny_model_dir, "--decode.step-interval-s=0.02") as running:
        assert interval(running) == ["--step-interval-s=0.02"]
    with up(tmp_path / "c", tiny_model_dir, "--prefill=0") as running:
        assert interval(running) == []
