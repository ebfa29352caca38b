"""Pullers that close with their test."""

from collections.abc import Callable, Iterator

import pytest
from pulling import Pulling


@pytest.fixture
def make_pulling(local) -> Iterator[Callable[..., Pulling]]:
    """`make_pulling(**options)` starts a puller with options of `Puller`."""
    made: list[Pulling] = []

    def make(**options: object) -> Pulling:
        made.append(Pulling(local, **options))
        return made[-1]

    yield make
    for pulling in made:
        pulling.puller.close()
        assert pulling.ends.empty(), "an outcome that no test asked for"


@pytest.fixture
def pulling(make_pulling: Callable[..., Pulling]) -> Pulling:
    """A puller with the usual options."""
    return make_pulling()
