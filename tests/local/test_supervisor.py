"""Children are kept running, told apart, and stopped together. The children are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from pdserve.errors import ServiceError
from pdserve.local.child import backoff_s, shown_log_line
from pdserve.local.plan import ChildSpec
from pdserve.local.ports import hold_port
from pdserve.local.supervisor import Supervisor

STAND_IN = Path(__file__).parent / "stand_in.py"


HELD: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _ports_are_given_back() -> Iterator[None]:
    yield
    while HELD:
        HELD.pop().close()


def a_spec(name: str, *arguments: str, niceness: int = 0) -> ChildSpec:
    metrics = hold_port("127.0.0.1", 0)
    HELD.append(metrics)
    port = metrics.getsockname()[1]
    command = [sys.executable, str(STAND_IN), str(port), *arguments]
    return ChildSpec(
        role="decode",
        id=name,
        command=command,
        ready_url=f"http://127.0.0.1:{port}",
        niceness=niceness,
        sockets={"METRICS_PORT": metrics},
    )


class Run:
    """A supervisor under test, and everything it reported."""

    def __init__(self, log_folder: Path, *specs: ChildSpec, restarts: bool = True, stop_timeout_s: float = 10) -> None:
        self.lines: list[tuple[str, str]] = []
        self.num_changes = 0
        self.is_ready = asyncio.Event()
        self.supervisor = Supervisor(
            specs,
            log_folder=log_folder,
            report=lambda who, what: self.lines.append((who, what)),
            on_change=self._changed,
            restarts=restarts,
            stop_timeout_s=stop_timeout_s,
            backoff=lambda _: 0.01,
        )
        self.children = self.supervisor.children

    def _changed(self) -> None:
        self.num_changes += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.supervisor.run(self.is_ready.set))
        try:
            await asyncio.wait_for(self.is_ready.wait(), 20)
            yield
        finally:
            self.supervisor.request_stop()
            await task

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110  another process changes it
                await asyncio.sleep(0.01)


async def test_children_become_ready_and_stop_together(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0"), a_spec("decode-1"))
    async with run.running():
        pids = [child.pid for child in run.children]
        assert all(pid and psutil.pid_exists(pid) for pid in pids)
        assert [child.state for child in run.children] == ["ready", "ready"]
        assert ("decode-0", "loading the weights") in run.lines
        assert ("decode-1", "ready") in run.lines
    assert not any(pid and psutil.pid_exists(pid) for pid in pids)
    assert [child.state for child in run.children] == ["exited", "exited"]


async def test_a_service_is_ready_only_when_every_child_is(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    run = Run(tmp_path, a_spec("quick"), a_spec("slow", "--ready-after", str(gate)))
    task = asyncio.create_task(run.supervisor.run(run.is_ready.set))
    await run.until(lambda: run.children[0].state == "ready")
    assert run.children[1].state == "starting"
    assert not run.is_ready.is_set()
    gate.touch()
    await asyncio.wait_for(run.is_ready.wait(), 20)
    run.supervisor.request_stop()
    await task


async def test_a_killed_child_is_started_again_and_the_others_live_on(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0"), a_spec("decode-1"))
    async with run.running():
        first, other = run.children[0].pid, run.children[1].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await run.until(lambda: run.children[0].pid not in (None, first) and run.children[0].state == "ready")
        assert run.children[1].pid == other
    assert any(who == "decode-0" and "SIGKILL; starting again" in what for who, what in run.lines)


async def test_without_restart_a_dead_child_stays_dead_and_the_others_live_on(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0"), a_spec("decode-1"), restarts=False)
    async with run.running():
        first = run.children[0].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await run.until(lambda: run.children[0].state == "exited")
        assert run.children[0].pid is None
        assert run.children[1].state == "ready"


async def test_a_child_that_cannot_start_ends_all_and_its_last_line_is_told(tmp_path: Path) -> None:
    broken = a_spec("decode-1", "--say", "setting MODEL: got 'x'", "--exit-with", "1")
    run = Run(tmp_path, a_spec("decode-0"), broken)
    with pytest.raises(ServiceError, match="decode-1 exited with status 1 before it was ready") as raised:
        await run.supervisor.run(run.is_ready.set)
    assert "setting MODEL: got 'x'" in str(raised.value)
    assert all(child.pid is None for child in run.children)


async def test_a_child_that_crashes_at_its_start_is_tried_three_times(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0", "--exit-with", "17"))
    with pytest.raises(ServiceError, match="status 17"):
        await run.supervisor.run(run.is_ready.set)
    assert run.lines.count(("decode-0", "loading the weights")) == 3


async def test_a_child_that_ignores_the_stop_is_killed_after_the_timeout(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0", "--stubborn"), stop_timeout_s=0.2)
    async with run.running():
        pid = run.children[0].pid
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert ("decode-0", "still there after 0.2 s: killed") in run.lines


async def test_a_second_stop_kills_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0", "--stubborn"), stop_timeout_s=60)
    async with asyncio.timeout(10):
        async with run.running():
            run.supervisor.request_stop()
        # `running` asks a second time


async def test_a_stop_in_the_pause_before_a_restart_is_immediate(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0"))
    run.children[0]._backoff = lambda _: 60.0
    async with asyncio.timeout(20):
        async with run.running():
            first = run.children[0].pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await run.until(lambda: run.children[0].state == "restarting")


async def test_a_child_yields_as_told(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("nice", niceness=7), a_spec("normal"))
    async with run.running():
        nice, normal = (psutil.Process(child.pid).nice() for child in run.children)
    assert nice - normal == 7


async def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0"))
    async with run.running():
        pid = run.children[0].pid
        assert pid is not None
        assert os.getpgid(pid) == pid != os.getpgrp()


async def test_log_lines_go_to_a_file_and_only_what_matters_to_the_terminal(tmp_path: Path) -> None:
    info = '{"level": "info", "message": "step 1"}'
    warning = '{"level": "warning", "message": "slow"}'
    run = Run(tmp_path, a_spec("decode-0", "--say", info, "--say", warning, "--say", "native crash"))
    async with run.running():
        await run.until(lambda: ("decode-0", "native crash") in run.lines)
        assert ("decode-0", "warning: slow") in run.lines
        assert not any("step 1" in what for _, what in run.lines)
        assert (tmp_path / "decode-0.log").read_text().splitlines() == [info, warning, "native crash"]


async def test_every_change_of_state_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0"))
    async with run.running():
        assert run.num_changes >= 3  # starting, started with a pid, ready


def test_the_pause_before_a_restart_doubles_up_to_half_a_minute() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4, 7, 50)] == [0.5, 1, 2, 4, 30, 30]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"level": "info", "message": "a"}', ""),
        ('{"level": "error", "message": "b"}', "error: b"),
        ('{"broken', '{"broken'),
        ('{"other": 1}', '{"other": 1}'),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("", ""),
    ],
)
def test_what_the_terminal_shows_of_a_line(line: str, shown: str) -> None:
    assert shown_log_line(line) == shown


async def test_readiness_of_another_program_at_the_same_address_is_not_believed(tmp_path: Path) -> None:
    run = Run(tmp_path, a_spec("decode-0", "--pid", "1"), a_spec("decode-1"))
    task = asyncio.create_task(run.supervisor.run(run.is_ready.set))
    await run.until(lambda: run.children[1].state == "ready")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run.is_ready.wait(), 0.5)
    assert run.children[0].state == "starting"
    run.supervisor.request_stop()
    await task
