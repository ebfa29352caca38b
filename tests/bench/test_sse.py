from __future__ import annotations

import itertools

import pytest

from pdserve.bench.sse import SseParser

STREAM = (
    b': keep-alive\n\nid: r:0\ndata: {"a":1}\n\ndata:no space\r\n\r\n'
    b"event: x\ndata: two\ndata: lines\n\ndata: \xe2\x82\xac\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', b"no space", b"two\nlines", "€".encode(), b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_events_do_not_depend_on_how_the_bytes_are_cut(size: int) -> None:
    parser = SseParser()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert list(itertools.chain.from_iterable(map(parser.feed, pieces))) == EVENTS


def test_an_unfinished_event_is_not_returned() -> None:
    assert SseParser().feed(b"data: {}\n") == []
