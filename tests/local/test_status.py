"""The table of `pdserve status`: what the supervisor and the bus know, told as one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry
from pdserve.cli import main
from pdserve.commands.status import merge, registered, table
from pdserve.local.service_file import LocalProcess, LocalService, owned, write
from pdserve.registration import GatewayRegistration, Role, WorkerRegistration, WorkerState


def a_worker(worker_id: str, pid: int, state: WorkerState = WorkerState.READY) -> WorkerRegistration:
    return WorkerRegistration(
        worker_id=worker_id,
        role=Role.DECODE,
        generation="g1",
        state=state,
        pid=pid,
        url="http://10.0.0.1:9101",
        model="tiny",
        fingerprint="f",
        kv_signature="k",
        block_size=16,
        num_blocks=8,
        max_model_len=64,
    )


def a_service(*processes: LocalProcess, redis_url: str = "unix:///nowhere") -> LocalService:
    return LocalService(
        service="default",
        url="http://127.0.0.1:8000",
        redis_url=redis_url,
        redis_pid=1,
        supervisor_pid=2,
        log_folder="logs",
        processes=list(processes),
    )


def a_process(pid: int | None, state: str = "ready") -> LocalProcess:
    url = "http://127.0.0.1:9101"
    return LocalProcess(role="decode", id="decode-0", pid=pid, url=url, metrics_url=f"{url}/metrics", state=state)


def test_a_process_known_to_both_is_one_row_with_its_generation() -> None:
    rows = merge(a_service(a_process(41)), [a_worker("decode-0", 41)], [])
    assert rows == [
        {
            "role": "decode",
            "id": "decode-0",
            "generation": "g1",
            "pid": 41,
            "url": "http://127.0.0.1:9101",
            "metrics_url": "http://127.0.0.1:9101/metrics",
            "state": "ready",
        }
    ]


def test_a_draining_worker_is_told_as_the_bus_knows_it() -> None:
    rows = merge(a_service(a_process(41)), [a_worker("decode-0", 41, WorkerState.DRAINING)], [])
    assert rows[0]["state"] == "draining"


def test_a_dead_process_is_not_ready_whatever_its_old_registration_says() -> None:
    rows = merge(a_service(a_process(None, "restarting")), [a_worker("decode-0", 41)], [])
    assert [(row["id"], row["pid"], row["state"]) for row in rows] == [("decode-0", None, "restarting")]


def test_processes_of_other_machines_are_rows_too() -> None:
    gateway = GatewayRegistration(gateway_id="g", generation="x", pid=9, url="u", metrics_url="u/metrics")
    rows = merge(a_service(a_process(41)), [a_worker("decode-0", 41), a_worker("decode-far", 42)], [gateway])
    assert [(row["role"], row["id"]) for row in rows] == [
        ("decode", "decode-0"),
        ("gateway", "g"),
        ("decode", "decode-far"),
    ]


def test_columns_line_up() -> None:
    lines = table(merge(a_service(a_process(41), a_process(None, "exited")), [], [])).splitlines()
    assert lines[0].split() == ["role", "id", "generation", "pid", "url", "metrics_url", "state"]
    assert len({line.index("http") for line in lines[1:]}) == 1


async def test_registrations_are_read_from_the_bus(redis_url: str) -> None:
    bus = Bus(redis_url, "other", timeout_s=2)
    await bus.start()
    await Registry(bus).announce_worker(a_worker("decode-7", 77), ttl_s=30)
    await bus.close()
    workers, gateways = await registered(redis_url, "other")
    assert [worker.worker_id for worker in workers] == ["decode-7"]
    assert gateways == []


def test_json_and_exit_status_of_a_running_service(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    with owned(tmp_path, "default") as file:
        write(file, a_service(a_process(os.getpid()), redis_url=redis_url))
        assert main(["status", "--json"]) == 0
        assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["ready"]
        write(file, a_service(a_process(os.getpid(), "starting"), redis_url=redis_url))
        assert main(["status"]) == 1


def test_status_without_a_service_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    assert main(["status"]) == 1
    assert "start one with `pdserve up`" in capsys.readouterr().err


def test_a_bus_that_is_away_leaves_the_supervisors_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    with owned(tmp_path, "default") as file:
        write(file, a_service(a_process(41), redis_url=f"unix://{tmp_path}/none.sock"))
        main(["status", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["pid"] == 41
    assert "the bus failed" in err


def test_all_services_of_the_machine_are_listed_each_under_its_name(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    with owned(tmp_path, "a") as first, owned(tmp_path, "b") as second:
        write(first, replace(a_service(a_process(os.getpid()), redis_url=redis_url), service="a"))
        write(second, replace(a_service(a_process(os.getpid(), "starting"), redis_url=redis_url), service="b"))
        assert main(["status"]) == 1
        shown = capsys.readouterr().out
        assert [line for line in shown.splitlines() if line.startswith("service ")] == ["service a", "service b"]
        assert main(["status", "--json"]) == 1
        assert [row["service"] for row in json.loads(capsys.readouterr().out)] == ["a", "b"]
        assert main(["status", "--service", "a"]) == 0
        assert "service a" not in capsys.readouterr().out
        assert main(["status", "--service", "c"]) == 1
        assert "no service 'c' runs on this machine (running: a, b)" in capsys.readouterr().err
