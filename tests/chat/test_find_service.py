from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve.arguments import base_url
from pdserve.errors import ServiceError, SettingError
from pdserve.local.find_service import DEFAULT_URL, service_url
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
    assert service_url(None, None, env) == DEFAULT_URL
    with ExitStack() as stack:
        run(stack, tmp_path, "a", "http://127.0.0.1:8123")
        assert service_url(None, None, env) == "http://127.0.0.1:8123"
    assert service_url(None, None, env) == DEFAULT_URL


def test_of_several_services_one_must_be_named(tmp_path: Path) -> None:
    env = {"PDS_HOME": str(tmp_path)}
    with ExitStack() as stack:
        run(stack, tmp_path, "a", "http://127.0.0.1:1")
        run(stack, tmp_path, "b", "http://127.0.0.1:2")
        with pytest.raises(ServiceError, match=r"a at http.*, b at http"):
            service_url(None, None, env)
        assert service_url(None, None, env | {"PDS_SERVICE": "b"}) == "http://127.0.0.1:2"
        assert service_url(None, "b", env) == "http://127.0.0.1:2"
        assert service_url(None, "b", env | {"PDS_SERVICE": "a"}) == "http://127.0.0.1:2"
        with pytest.raises(ServiceError, match=r"no service 'c' runs.*\(running: a, b\)"):
            service_url(None, "c", env)
        assert service_url("host:9", "b", env) == "http://host:9"


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("host:8000/v1", "http://host:8000"),
        ("https://host/prefix/v1", "https://host/prefix"),
        ("https://host/prefix//", "https://host/prefix"),
        ("[::1]:8000", "http://[::1]:8000"),
        (" host:1 ", "http://host:1"),
        ("http://host/v10", "http://host/v10"),
    ],
)
def test_a_url_is_taken_as_people_type_it(typed: str, url: str) -> None:
    assert base_url(typed) == url


@pytest.mark.parametrize(
    "typed", ["", "ftp://host", "http://", "http://host:port", "http://a b", "host:99999", "http://h/?q=1", "://x"]
)
def test_what_is_no_url_is_said_with_what_was_typed(typed: str) -> None:
    with pytest.raises(SettingError, match="--url") as caught:
        base_url(typed)
    assert repr(typed) in str(caught.value)
