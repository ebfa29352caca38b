"""The service that verify, benchmarks and these tests start: it says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.errors import ServiceError
from pdserve.local.service import PrivateService, held_blocks

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_a_process_that_cannot_start_is_named_with_its_last_words_and_the_others_are_stopped(
    tiny_model_dir: Path,
) -> None:
    before = set(psutil.Process().children(recursive=True))
    service = PrivateService(tiny_model_dir, role_settings={"decode": {"BLOCK_SIZE": "many"}})
    with pytest.raises(ServiceError, match=r"(?s)decode-0 exited with .*BLOCK_SIZE.*many"):
        service.start()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_service_is_ready_when_entered_and_gone_when_left(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.setenv("PDS_SERVED_MODEL_NAME", "of-the-callers-environment")
    monkeypatch.setenv("PDS_CPU_KERNELS", "on")  # says how this machine computes, so it holds for services, too
    with PrivateService(tiny_model_dir, settings={"NUM_BLOCKS": 64}) as service:
        assert httpx.get(f"{service.url}/ready").status_code == 200
        assert [m["id"] for m in httpx.get(f"{service.url}/v1/models").json()["data"]] == [tiny_model_dir.name]
        assert {name: ledger["total"] for name, ledger in service.ledgers().items()} == {
            "prefill-0": 64,
            "decode-0": 64,
        }
        check_metrics(service)
        for process in service.workers:
            assert psutil.Process(process.pid).environ()["PDS_CPU_KERNELS"] == "on"
        pids = [process.pid for process in service.processes]
    assert not [pid for pid in pids if pid and psutil.pid_exists(pid) and _is_our_child(pid)]


def check_metrics(service: PrivateService) -> None:
    """Running processes have the metrics, and the values of labels, that docs/metrics.md lists."""
    page = importlib.import_module("list_metrics")
    gateway, worker, _ = (sorted(page.rows(text)) for text in page.expositions().values())
    for process in service.processes:
        found = sorted(page.rows(httpx.get(process.metrics_url).text))
        assert found == (gateway if process.role == "gateway" else worker), process.role


def _is_our_child(pid: int) -> bool:
    return psutil.Process(pid).ppid() == os.getpid()


def test_held_blocks_are_all_but_free_and_cached_ones() -> None:
    states = {"free": 5, "cached": 4, "owned": 1, "leased": 2, "receiving": 3, "quarantined": 4}
    assert held_blocks({"by_state": states, "ok": True}) == 10
    assert held_blocks({"by_state": {"free": 9, "cached": 1}, "ok": True}) == 0
    assert held_blocks({"ok": False, "error": "block 3 has two owners"}) == 1, (
        "a ledger that does not add up is never clean"
    )
