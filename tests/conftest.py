"""Fixtures that all tests share: a real Redis-compatible server and a tiny model made at test time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


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
