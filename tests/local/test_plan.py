"""Which processes `pdserve up` starts, with which settings."""

from __future__ import annotations

import sys

import pytest

from pdserve.errors import SettingError
from pdserve.local.plan import (
    YIELDING_NICENESS,
    Threads,
    child_command,
    is_set,
    parse_up,
    resolved,
    step_interval_s,
    threads_for,
    worker_spec,
)
from pdserve.settings import DecodeSettings, PrefillSettings


def test_nothing_said_is_one_process_of_each_role_that_restarts() -> None:
    options = parse_up([])
    assert options.num == {"gateway": 1, "prefill": 1, "decode": 1}
    assert options.flags == {"gateway": [], "prefill": [], "decode": []}
    assert options.restarts
    assert not options.is_verbose


def test_numbers_of_processes_and_switches() -> None:
    options = parse_up(["--prefill", "2", "--decode=3", "--gateways", "4", "--no-restart", "--verbose"])
    assert options.num == {"gateway": 4, "prefill": 2, "decode": 3}
    assert not options.restarts
    assert options.is_verbose


def test_a_setting_goes_to_every_role_that_knows_it() -> None:
    options = parse_up(["--model", "tiny", "--block-size", "8", "--port", "0", "--local-prefill", "never"])
    assert options.flags["gateway"] == ["--model=tiny", "--port=0", "--local-prefill=never"]
    assert options.flags["prefill"] == ["--model=tiny", "--block-size=8"]
    assert options.flags["decode"] == ["--model=tiny", "--block-size=8", "--local-prefill=never"]


def test_a_role_override_goes_to_that_role_alone_and_wins() -> None:
    options = parse_up(["--decode.max-num-seqs", "8", "--max-num-seqs", "4", "--prefill.max-num-seqs=2"])
    settings, _ = resolved("prefill", options.flags["prefill"], {}, {})
    assert isinstance(settings, PrefillSettings)
    assert settings.max_num_seqs == 2


def test_redis_is_short_for_redis_url() -> None:
    flags = parse_up(["--redis", "redis://h:1/0"]).flags
    assert all(words == ["--redis-url=redis://h:1/0"] for words in flags.values())


def test_a_switch_without_value_does_not_swallow_the_next_flag() -> None:
    flags = parse_up(["--deterministic", "--no-prefix-cache", "--model", "tiny"]).flags["decode"]
    assert flags == ["--deterministic", "--no-prefix-cache", "--model=tiny"]
    settings, _ = resolved("decode", flags, {}, {})
    assert isinstance(settings, DecodeSettings)
    assert settings.deterministic
    assert not settings.prefix_cache


@pytest.mark.parametrize("word", ["two", "-1", "1.5", ""])
def test_a_number_of_processes_that_is_none_is_refused_by_name(word: str) -> None:
    with pytest.raises(SettingError, match="--decode"):
        parse_up([f"--decode={word}"])


@pytest.mark.parametrize("argv", [["--gateways", "0"], ["--prefill", "0", "--decode", "0"]])
def test_a_service_without_gateway_or_worker_is_refused(argv: list[str]) -> None:
    with pytest.raises(SettingError, match="at least one"):
        parse_up(argv)


def test_an_unknown_flag_is_refused_with_a_suggestion() -> None:
    flags = parse_up(["--kv-leese-s", "5"]).flags
    with pytest.raises(SettingError, match="--kv-lease-s"):
        resolved("decode", flags["decode"], {}, {})


@pytest.mark.parametrize("flag", ["--prefill.worker-id", "--metrics-port", "--decode.metrics-port"])
def test_settings_that_processes_cannot_share_are_refused(flag: str) -> None:
    with pytest.raises(SettingError, match="its own"):
        parse_up([flag, "9"])


def test_defaults_of_the_command_yield_to_flags_and_environment() -> None:
    defaults = {"DRAIN_S": 3.0, "THREADS": 2, "LOG_FORMAT": "json"}
    settings, added = resolved("decode", ["--threads=7"], {"PDS_LOG_FORMAT": "console"}, defaults)
    assert isinstance(settings, DecodeSettings)
    assert (settings.threads, settings.log_format, settings.drain_s) == (7, "console", 3.0)
    assert added == ["--drain-s=3.0"]


def test_a_default_that_a_role_does_not_know_is_left_out() -> None:
    _, added = resolved("gateway", [], {}, {"THREADS": 2, "DRAIN_S": 3.0})
    assert added == ["--drain-s=3.0"]


def test_is_set_tells_a_value_from_a_default() -> None:
    assert not is_set("gateway", "REDIS_URL", [], {})
    assert is_set("gateway", "REDIS_URL", ["--redis-url=redis://127.0.0.1:6379/0"], {})
    assert is_set("gateway", "REDIS_URL", [], {"PDS_REDIS_URL": "redis://h:1"})


@pytest.mark.parametrize(
    ("cores", "num_prefill", "num_decode", "expected"),
    [
        (2, 1, 1, Threads(prefill=2, decode=2)),
        (2, 2, 2, Threads(prefill=1, decode=1)),
        (2, 1, 0, Threads(prefill=2, decode=2)),
        (2, 0, 1, Threads(prefill=2, decode=2)),
        (16, 2, 1, Threads(prefill=8, decode=16)),
        (1, 3, 3, Threads(prefill=1, decode=1)),
    ],
)
def test_each_role_may_use_every_core(cores: int, num_prefill: int, num_decode: int, expected: Threads) -> None:
    assert threads_for(cores, num_prefill, num_decode) == expected


def test_decode_rests_below_the_target_when_prefill_shares_its_cores() -> None:
    assert step_interval_s(0.1, num_prefill=1) == pytest.approx(0.09)
    assert step_interval_s(0.1, num_prefill=0) is None


def test_workers_wait_passively_and_a_yielding_one_is_nice() -> None:
    spec = worker_spec("prefill", "prefill-0", ["x"], "http://h:1", threads=3, yields=True)
    assert spec.env == {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "3"}
    assert spec.niceness == YIELDING_NICENESS > 0
    assert worker_spec("decode", "decode-0", ["x"], "http://h:1", threads=3, yields=False).niceness == 0
    assert spec.url == "http://h:1"


def test_a_child_runs_the_command_of_its_role() -> None:
    assert child_command("decode", ["--threads=1"]) == [sys.executable, "-P", "-m", "pdserve", "decode", "--threads=1"]
