"""`pdserve bus`: what tail prints is what send takes; nothing is sent unless every line is right."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry
from pdserve.bus.tail import Seen, as_text
from pdserve.commands.bus import main
from pdserve.messages import Cancel, SequenceTokens, TokenBatch, decode, encode
from pdserve.registration import GatewayRegistration

GATEWAY = GatewayRegistration(gateway_id="gw", generation="g", pid=2, url="http://h:2", metrics_url="http://h:3")
CANCEL = Cancel(request_id="r1", choice=0, attempt=1, nonce="n")


@pytest.fixture(autouse=True)
def _no_service_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    monkeypatch.setattr("pdserve.commands.bus.setup_logging", lambda *args, **kwargs: None)


def registered_gateway(url: str) -> None:
    async def announce() -> None:
        bus = Bus(url, "test", timeout_s=2.0)
        await Registry(bus).announce_gateway(GATEWAY, 60)
        await bus.close()

    asyncio.run(announce())


def test_what_tail_prints_raw_is_what_send_takes(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registered_gateway(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.xadd("pds:{test}:tokens:gw", {"m": encode([CANCEL, CANCEL])})
        assert main(["tail", "--raw", "--count", "2", "--redis", redis_url, "--service", "test"]) == 0
        printed = capsys.readouterr().out
        assert [json.loads(line)["message"]["type"] for line in printed.splitlines()] == ["Cancel", "Cancel"]
        client.delete("pds:{test}:tokens:gw")
        (tmp_path / "lines").write_text(printed)
        assert main(["send", str(tmp_path / "lines"), "--redis-url", redis_url, "--service", "test"]) == 0
        assert "sent 2 messages" in capsys.readouterr().out
        ((_, fields),) = client.xrange("pds:{test}:tokens:gw")
        assert decode(fields[b"m"]) == [CANCEL, CANCEL]


def test_tail_follows_what_comes_later_and_shows_unreadable_entries(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    registered_gateway(redis_url)

    def write() -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.xadd("pds:{test}:tokens:gw", {"m": b"\xc1"})
            client.xadd("pds:{test}:tokens:gw", {"m": encode([CANCEL])})

    writer = threading.Timer(0.3, write)
    writer.start()
    assert main(["tail", "--count", "2", "--redis", redis_url, "--service", "test"]) == 0
    writer.join()
    first, second = capsys.readouterr().out.splitlines()
    assert "tokens:gw  unreadable" in first
    assert re.search(r"tokens:gw  Cancel request_id=r1 choice=0 attempt=1", second)


def test_short_stream_names_are_completed_with_the_service(redis_url: str, tmp_path: Path) -> None:
    line = {"stream": "inbox:d1:g1", "message": {"type": "Cancel"} | {"request_id": "r", "choice": 0}}
    line["message"] |= {"attempt": 1, "nonce": "n"}  # type: ignore[operator]
    (tmp_path / "lines").write_text(json.dumps(line))
    assert main(["send", str(tmp_path / "lines"), "--redis", redis_url, "--service", "test"]) == 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.xlen("pds:{test}:inbox:d1:g1") == 1


@pytest.mark.parametrize(
    "bad", ["{", '{"stream": "s"}', '{"stream": "s", "message": {"type": "Nope"}}', '{"stream": "s", "error": "x"}']
)
def test_one_bad_line_means_nothing_is_sent(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    good = '{"stream": "s", "message": {"type": "Cancel", "request_id": "r", "choice": 0, "attempt": 1, "nonce": "n"}}'
    (tmp_path / "lines").write_text(f"{good}\n{bad}\n")
    assert main(["send", str(tmp_path / "lines"), "--redis", redis_url]) == 1
    assert "line 2" in capsys.readouterr().err
    with redis.Redis.from_url(redis_url) as client:
        assert list(client.scan_iter()) == []


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "usage"),
        (["watch"], 2, "usage"),
        (["send"], 2, "setting FILE: expected a file of JSON lines"),
        (["send", "/no/such/file"], 1, "cannot read /no/such/file"),
        (["tail", "--count", "many"], 2, "--count"),
        (["tail", "--kv-lease-s", "1"], 2, "--kv-lease-s"),
        (["tail", "--redis", "unix:///no/such.sock", "--bus-timeout-s", "0.2"], 1, "the bus"),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    assert words in capsys.readouterr().err


def test_without_a_url_it_finds_the_service_of_this_machine(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Service:
        service, redis_url = "test", ""

    Service.redis_url = redis_url
    monkeypatch.setattr("pdserve.commands.bus.read_all", lambda home: [Service])
    (tmp_path / "lines").write_text("")
    assert main(["send", str(tmp_path / "lines")]) == 0


def test_long_lists_are_cut_for_people_but_not_for_machines() -> None:
    tokens: Any = SequenceTokens(request_id="r", choice=0, attempt=1, nonce="n", index=0, token_ids=list(range(100)))
    batch = TokenBatch(worker_id="w", generation="g", items=[tokens])
    line = as_text(Seen("pds:{t}:tokens:gw", "1-1", batch, b""), "pds:{t}:")
    assert "0, 1, 2, 3, 4, 5, … 100 in all" in line
    assert "99" not in line


def test_looking_at_the_bus_needs_no_torch() -> None:
    program = "import sys, pdserve.commands.bus; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
