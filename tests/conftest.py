"""What all tests share: a real Redis-compatible server, a tiny model made at test time, and turns side by side."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is marked `alone` runs while no other process of pytest-xdist runs one."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with _turn(Path(item.config.option.basetemp).parent, is_alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def _turn(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Hold `running` together with others, or alone; who waits for it is not overtaken, for it holds `next`."""
    with ExitStack() as following:
        following.enter_context(_locked(folder / "next.lock", fcntl.LOCK_EX))
        with _locked(folder / "running.lock", fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH):
            following.close()
            yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # forked children hold the file open


@pytest.fixture
def one_up_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No other process of pytest-xdist starts `pdserve up` meanwhile: it counts its ports from one number."""
    with _locked(tmp_path_factory.getbasetemp().parent / "up.lock", fcntl.LOCK_EX):
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of one embedded server for the whole session."""
    from pdserve.local.redis_server import RedisServer  # noqa: PLC0415  only for tests that use it

    with RedisServer() as server:
        yield server.url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of an empty real Redis-compatible server."""
    import redis  # noqa: PLC0415  only for tests that use it

    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama with a byte-level tokenizer and a chat template."""
    from pdserve.models.tiny import make_model  # noqa: PLC0415  only for tests that use it

    return make_model(tmp_path_factory.mktemp("models") / "tiny", arch="llama", seed=0)
