import os

import pytest
from benchmarks.layouts import UP, Layout

from pdserve.errors import SettingError


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("p1d2", Layout(1, 2)),
        ("p2d4+nice10", Layout(2, 4, niceness=10)),
        ("p1d1+pin", Layout(1, 1, is_pinned=True)),
        ("p1d2+nice19+pin+active", Layout(1, 2, 19, is_pinned=True, waits_actively=True)),
    ],
)
def test_a_layout_is_read_as_it_is_written(text, layout):
    assert Layout.parse(text) == layout
    assert str(layout) == text


@pytest.mark.parametrize("text", ["", "p1", "d2p1", "p1d2+fast", "p1d2 +pin", "p1d2+nice"])
def test_anything_else_is_refused(text):
    with pytest.raises(SettingError, match="layouts"):
        Layout.parse(text)


def test_pinned_workers_share_no_core_where_there_are_two(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    layout = Layout.parse("p1d3+pin")
    assert (layout.cores("decode"), layout.cores("prefill")) == ({0, 1, 2}, {5})
    assert Layout.parse("p1d3").cores("prefill") == {0, 1, 2, 5}


def test_one_core_is_shared_whatever_is_pinned(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    layout = Layout.parse("p1d1+pin")
    assert layout.cores("decode") == layout.cores("prefill") == {3}


def test_the_layout_of_up_yields_to_decode():
    assert UP.niceness > 0
    assert UP.decode_threads >= UP.prefill_threads
