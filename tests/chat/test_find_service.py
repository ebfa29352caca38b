from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve.errors import ServiceError
from pdserve.local.find_service import DEFAULT_URL, find_service_url
from pdserve.local.service_file import LocalService, owned, write


def run(stack: ExitStack, home: Path, name: str, url: str) -> None:
    file = stack.enter_context(owned(home, name))
    write(
        file,
        LocalService(
            service=name, url=url, redis_url="", redis_pid=None, supervisor_pid=1, log_folder="", processes=[]
        ),
    )


def test_the_running_service_is_found_and_the_default_is_for_none(tmp_path: Path) -> None:
    env = {"PDS_HOME": str(tmp_path)}
    assert find_service_url(env) == DEFAULT_URL
    with ExitStack() as stack:
        run(stack, tmp_path, "a", "http://127.0.0.1:8123")
        assert find_service_url(env) == "http://127.0.0.1:8123"
    assert find_service_url(env) == DEFAULT_URL


def test_of_several_services_one_must_be_named(tmp_path: Path) -> None:
    env = {"PDS_HOME": str(tmp_path)}
    with ExitStack() as stack:
        run(stack, tmp_path, "a", "http://127.0.0.1:1")
        run(stack, tmp_path, "b", "http://127.0.0.1:2")
        with pytest.raises(ServiceError, match=r"a at http.*, b at http"):
            find_service_url(env)
        assert find_service_url(env | {"PDS_SERVICE": "b"}) == "http://127.0.0.1:2"
