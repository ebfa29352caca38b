"""The number of threads respects affinity and the container's quota."""

from __future__ import annotations

import os

import pytest

from pdserve.engine.executors.cpu.processors import usable_processors


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("100000 100000", 1),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("9900000 100000", 6),
        ("max 100000", 6),
        ("", 6),
    ],
)
def test_a_quota_limits_the_threads(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_processors(tmp_path / "cpu.max") == expected


def test_without_a_control_group_affinity_decides(tmp_path):
    assert usable_processors(tmp_path / "nothing") == len(os.sched_getaffinity(0))
