"""What runs on this machine is told truthfully, also after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ServiceError
from pdserve.local.service_file import LocalProcess, LocalService, owned, read, read_all, write


def a_service(name: str) -> LocalService:
    process = LocalProcess(role="decode", id="decode-0", pid=7, url="u", metrics_url="m", state="ready")
    return LocalService(
        service=name,
        url="http://127.0.0.1:8000",
        redis_url="unix:///nowhere",
        redis_pid=None,
        supervisor_pid=6,
        log_folder="logs",
        processes=[process],
    )


def test_a_running_service_reads_as_written(tmp_path: Path) -> None:
    with owned(tmp_path, "default") as file:
        write(file, a_service("default"))
        assert read(tmp_path, "default") == a_service("default")
    assert read(tmp_path, "default") is None


def test_a_second_service_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with (
        owned(tmp_path, "default"),
        pytest.raises(ServiceError, match="'default' runs here already"),
        owned(tmp_path, "default"),
    ):
        pass


def test_a_name_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with owned(tmp_path, "default") as file:
            write(file, a_service("default"))


def test_the_file_of_a_killed_supervisor_is_not_believed(tmp_path: Path) -> None:
    with owned(tmp_path, "default") as file:
        write(file, a_service("default"))
        left_behind = file.read_bytes()
    file.write_bytes(left_behind)
    assert read(tmp_path, "default") is None
    assert read_all(tmp_path) == []


def test_all_services_are_found(tmp_path: Path) -> None:
    with owned(tmp_path, "a") as first, owned(tmp_path, "b") as second:
        write(first, a_service("a"))
        write(second, a_service("b"))
        assert [service.service for service in read_all(tmp_path)] == ["a", "b"]


def test_nothing_ever_ran_here(tmp_path: Path) -> None:
    assert read(tmp_path, "default") is None
    assert read_all(tmp_path) == []


def test_between_taking_the_name_and_the_first_write_nothing_is_told(tmp_path: Path) -> None:
    with owned(tmp_path, "default"):
        assert read(tmp_path, "default") is None


def test_only_its_owner_may_read_it_for_urls_may_hold_passwords(tmp_path: Path) -> None:
    with owned(tmp_path, "default") as file:
        for _ in range(2):
            write(file, a_service("default"))
            assert file.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError, match="set PDS_HOME"), owned(tmp_path / "file", "default"):
        pass
