"""Settings: precedence of the four sources, casting, and complaints that name the setting."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdserve.errors import SettingError
from pdserve.operator.settings import OperatorSettings
from pdserve.settings import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    SharedSettings,
    describe,
    known_names,
    load,
)
from pdserve.settings.field import not_yet, settings_of

PROCESSES = [GatewaySettings, PrefillSettings, DecodeSettings, OperatorSettings]

NAMES_OF_THE_OPERATIONS_CONTRACT = """
MODEL SERVED_MODEL_NAME CHAT_TEMPLATE DTYPE QUANTIZATION KV_DTYPE MAX_MODEL_LEN BLOCK_SIZE NUM_BLOCKS KV_MEMORY_FRACTION
KV_MEMORY_BYTES MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS MAX_WAIT_S PREFIX_CACHE DEVICE EXECUTOR THREADS SEED DETERMINISTIC
INTEGRITY TRANSPORT TRANSFER_HOST TRANSFER_PORT ADVERTISE_HOST LOCAL_PREFILL REDIS_URL SERVICE WORKER_ID HOST PORT
METRICS_PORT HEARTBEAT_S KV_LEASE_S QUARANTINE_S HANDOFF_TIMEOUT_S PREFILL_TIMEOUT_S STEP_TIMEOUT_S REQUEST_DEADLINE_S
PROGRESS_TIMEOUT_S REDISPATCH_WAIT_S BUS_TIMEOUT_S DRAIN_S MAX_ATTEMPTS MAX_QUEUE_REQUESTS MAX_QUEUE_TOKENS
HOLD_REQUESTS HOLD_TIMEOUT_S MAX_BODY_BYTES SSE_KEEPALIVE_S CLIENT_STALL_TIMEOUT_S STREAM_BUFFER_BYTES RESUME_GRACE_S
STREAM_TTL_S TIMELINE_TTL_S API_KEYS_FILE TTFT_SLO_S TPOT_SLO_S HANDOFF_SLO_S LOG_LEVEL LOG_FORMAT OTLP_ENDPOINT
FAKE_TTFT_S FAKE_ITL_S FAKE_BURST FAKE_START_S FAKE_SCRIPT HOME FAULTS PRODUCTION
"""


def test_every_name_of_the_contract_is_known() -> None:
    assert set(NAMES_OF_THE_OPERATIONS_CONTRACT.split()) <= known_names()


def test_defaults_are_those_of_the_contract() -> None:
    gateway, decode = load(GatewaySettings), load(DecodeSettings)
    assert (gateway.progress_timeout_s, gateway.redispatch_wait_s, gateway.max_attempts) == (20, 30, 3)
    assert (gateway.heartbeat_s, gateway.registration_ttl_s, gateway.bus_timeout_s) == (1, 3, 2)
    assert (decode.block_size, decode.kv_lease_s, decode.integrity, decode.local_prefill) == (16, 10, "full", "auto")


def test_a_flag_wins_over_environment_over_file_over_the_commands_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("kv_lease_s: 7\nBLOCK_SIZE: 32\nmax-num-seqs: 9\nthreads: 2\n")
    settings = load(
        DecodeSettings,
        ["--config", str(file), "--kv-lease-s", "5"],
        {"PDS_KV_LEASE_S": "6", "PDS_BLOCK_SIZE": "64", "PATH": "/bin"},
        {"kv_lease_s": 8, "block_size": 1, "max_num_seqs": 3, "MAX_WAIT_S": 4, "num_blocks": None},
    )
    assert settings.kv_lease_s == 5
    assert settings.block_size == 64
    assert settings.max_num_seqs == 9
    assert settings.max_wait_s == 4
    assert settings.threads == 2
    assert settings.num_blocks is None


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("service: blue\n")
    assert load(GatewaySettings, [], {"PDS_CONFIG": str(tmp_path / "s.yaml")}).service == "blue"


@pytest.mark.parametrize("word", ["on", "true", "1", "ON", "True", "yes"])
def test_switches_take_words_for_on(word: str) -> None:
    assert load(DecodeSettings, [], {"PDS_DETERMINISTIC": word}).deterministic is True


@pytest.mark.parametrize("word", ["off", "false", "0", "no"])
def test_switches_take_words_for_off(word: str) -> None:
    assert load(DecodeSettings, [f"--prefix-cache={word}"]).prefix_cache is False


def test_a_switch_without_a_value_is_on_and_with_no_before_it_off() -> None:
    settings = load(DecodeSettings, ["--deterministic", "--no-prefix-cache", "--kv-lease-s", "4"])
    assert (settings.deterministic, settings.prefix_cache, settings.kv_lease_s) == (True, False, 4)
    assert load(DecodeSettings, ["--deterministic", "off"]).deterministic is False


def test_a_yaml_boolean_is_a_switch(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("prefix_cache: off\ndeterministic: true\n")
    settings = load(DecodeSettings, ["--config", str(tmp_path / "s.yaml")])
    assert (settings.prefix_cache, settings.deterministic) == (False, True)


def test_sizes_take_units() -> None:
    assert load(DecodeSettings, ["--kv-memory-bytes", "64MiB"]).kv_memory_bytes == 64 * 1024**2
    assert load(DecodeSettings, ["--kv-memory-bytes", "12345"]).kv_memory_bytes == 12345


@pytest.mark.parametrize(
    ("cls", "argv", "env", "words"),
    [
        (DecodeSettings, [], {"PDS_KV_LEASE_S": "soon"}, ["KV_LEASE_S", "'soon'", "number > 0"]),
        (DecodeSettings, ["--block-size", "0"], {}, ["BLOCK_SIZE", "'0'", "from 1 to 1024"]),
        (DecodeSettings, ["--heartbeat-s", "nan"], {}, ["HEARTBEAT_S", "nan"]),
        (DecodeSettings, ["--heartbeat-s", "inf"], {}, ["HEARTBEAT_S", "inf"]),
        (DecodeSettings, ["--transport", "rdma"], {}, ["TRANSPORT", "rdma", "auto, nixl, tcp"]),
        (GatewaySettings, ["--port", "70000"], {}, ["PORT", "65535"]),
        (GatewaySettings, ["--redis-url", "localhost"], {}, ["REDIS_URL", "localhost", "redis://"]),
        (GatewaySettings, ["--service", "a b{}"], {}, ["SERVICE", "a b{}"]),
        (GatewaySettings, [], {"PDS_LOG_FORMAT": "xml"}, ["LOG_FORMAT", "console, json"]),
        (GatewaySettings, ["--port"], {}, ["PORT", "a value after --port"]),
        (GatewaySettings, ["8000"], {}, ["8000", "starts with --"]),
        (GatewaySettings, ["--config", "/no/such/file"], {}, ["CONFIG", "/no/such/file"]),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(
    cls: type[SharedSettings], argv: list[str], env: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SettingError) as caught:
        load(cls, argv, env)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_environment_name_is_an_error_with_close_matches() -> None:
    with pytest.raises(SettingError, match=r"PDS_KV_LEASE_SECONDS.*PDS_KV_LEASE_S"):
        load(GatewaySettings, [], {"PDS_KV_LEASE_SECONDS": "5"})


def test_an_unknown_flag_is_an_error_with_close_matches() -> None:
    with pytest.raises(SettingError, match=r"--kv-leas-s.*--kv-lease-s"):
        load(DecodeSettings, ["--kv-leas-s", "5"])


def test_an_unknown_name_in_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("blok_size: 16\n")
    with pytest.raises(SettingError, match=r"blok_size.*BLOCK_SIZE.*s\.yaml"):
        load(DecodeSettings, ["--config", str(tmp_path / "s.yaml")])


@pytest.mark.parametrize("content", ["- a\n", "a: [\n", "block_size: [1, 2]\n"])
def test_a_file_that_is_no_mapping_of_values_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.yaml").write_text(content)
    with pytest.raises(SettingError):
        load(DecodeSettings, ["--config", str(tmp_path / "s.yaml")])


def test_names_of_other_processes_are_fine_in_the_environment_but_not_as_flags() -> None:
    load(GatewaySettings, [], {"PDS_BLOCK_SIZE": "32", "PDS_FAULTS": "1", "PDS_HOME": "/x", "PDS_FAKE_TTFT_S": "1"})
    with pytest.raises(SettingError, match="--block-size"):
        load(GatewaySettings, ["--block-size", "32"])


def test_a_flag_of_another_process_is_an_error_that_says_whose_it_is() -> None:
    with pytest.raises(SettingError, match=r"--deterministic.*one of prefill and decode alone"):
        load(GatewaySettings, ["--deterministic"])
    with pytest.raises(SettingError, match=r"--no-prefix-cache.*one of prefill and decode alone"):
        load(GatewaySettings, ["--no-prefix-cache"])
    with pytest.raises(SettingError, match=r"--seed.*one of gateway alone"):
        load(PrefillSettings, ["--seed", "1"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished(SharedSettings):
    """A process with a setting that a later version brings."""

    horn_hz: None = not_yet("The process hoots.", because="this version is silent; use a bell")


@pytest.mark.parametrize("source", ["flag", "environment", "file", "default of the command"])
def test_a_setting_that_is_not_supported_yet_is_refused_with_its_reason_wherever_it_is_set(
    source: str, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text("horn_hz: 440\n")
    argv = {"flag": ["--horn-hz", "440"], "file": ["--config", str(tmp_path / "s.yaml")]}.get(source, [])
    env = {"PDS_HORN_HZ": "440"} if source == "environment" else {}
    defaults = {"HORN_HZ": 440} if source == "default of the command" else {}
    with pytest.raises(SettingError, match=r"HORN_HZ.*440.*none, for it is not supported yet: this version is silent"):
        load(Unfinished, argv, env, defaults)
    with pytest.raises(SettingError, match="HORN_HZ"):
        describe(Unfinished, argv, env, defaults)


def test_a_setting_that_is_not_supported_yet_may_be_none() -> None:
    assert load(Unfinished, ["--horn-hz", "none"], {"PDS_HORN_HZ": ""}).horn_hz is None


def test_an_empty_environment_variable_counts_as_unset() -> None:
    assert load(DecodeSettings, [], {"PDS_NUM_BLOCKS": "", "PDS_BLOCK_SIZE": " "}).block_size == 16


def test_none_is_a_value_where_a_setting_may_be_absent() -> None:
    assert load(DecodeSettings, ["--num-blocks", "none"], {"PDS_NUM_BLOCKS": "5"}).num_blocks is None


def test_dependent_defaults_follow_what_they_depend_on() -> None:
    assert load(DecodeSettings, ["--kv-lease-s", "3"]).quarantine_s == 6
    assert load(DecodeSettings, ["--kv-lease-s", "3", "--quarantine-s", "9"]).quarantine_s == 9
    assert load(GatewaySettings, ["--tpot-slo-s", "0.04"]).handoff_slo_s == pytest.approx(0.2)


def test_leases_are_renewed_in_time_even_when_they_are_shorter_than_three_heartbeats() -> None:
    assert load(DecodeSettings, ["--kv-lease-s", "1.5"]).renewal_s == 0.5
    assert load(DecodeSettings).renewal_s == 1


def is_sentence(text: str) -> bool:
    return text[0] == text[0].upper() and text.endswith(".") and len(text.split()) >= 4


@pytest.mark.parametrize("cls", PROCESSES)
def test_every_setting_has_help_and_a_reason_and_its_default_passes_its_own_check(cls: type[SharedSettings]) -> None:
    for name, (field, about) in settings_of(cls).items():
        assert is_sentence(about.help), name
        assert is_sentence(about.why), name
        if field.default not in (None, ""):
            shown = "on" if field.default is True else "off" if field.default is False else str(field.default)
            assert about.kind.parse(shown) == field.default, name
        assert name.endswith(("_S", "_SLO_S")) <= (about.unit == "s"), name
    assert set(settings_of(cls)) == {field.name.upper() for field in dataclasses.fields(cls)}


def test_describe_tells_value_default_unit_and_origin_of_every_setting(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("block_size: 8\n")
    rows = describe(DecodeSettings, ["--kv-lease-s=5", "--config", str(tmp_path / "s.yaml")], {"PDS_THREADS": "1"})
    by_name = {row["name"]: row for row in rows}
    assert list(by_name) == list(settings_of(DecodeSettings))
    assert by_name["KV_LEASE_S"] | {"help": "", "why": "", "expected": ""} == {
        "name": "KV_LEASE_S",
        "value": 5.0,
        "default": 10.0,
        "unit": "s",
        "origin": "flag --kv-lease-s",
        "help": "",
        "why": "",
        "expected": "",
    }
    assert by_name["THREADS"]["origin"] == "environment PDS_THREADS"
    assert by_name["BLOCK_SIZE"]["origin"] == f"file {tmp_path / 's.yaml'}"
    assert by_name["HEARTBEAT_S"]["origin"] == "default"


def test_describe_does_not_show_the_password_of_the_bus() -> None:
    rows = describe(GatewaySettings, ["--redis-url", "redis://:secret@host:1/0"])
    assert "secret" not in str(rows)
    assert "secret" not in str(describe(GatewaySettings, ["--redis-url", "redis://:se@secret@host:1/0"]))
    assert load(GatewaySettings, ["--redis-url", "redis://:secret@host:1/0"]).redis_url == "redis://:secret@host:1/0"


def test_help_lists_every_flag_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(PrefillSettings, ["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in settings_of(PrefillSettings):
        assert "--" + name.lower().replace("_", "-") in shown


@pytest.mark.parametrize(
    "env",
    [
        {"PDS_REDIS_URL": "redis://:hunter2 with a blank@host:1/0"},
        {"PDS_REDIS_URL": "redis:/:hunter2@host"},
        {"PDS_REDIS_URL": "redis://:p@hunter2@host with a blank"},
        {"PDS_REDIS_PASSWORD": "hunter2"},
        {"PDS_HF_TOKEN": "hunter2"},
        {"PDS_REDIS_URLS": "redis://:hunter2@host"},
    ],
)
def test_no_complaint_shows_a_secret(env: dict[str, str]) -> None:
    with pytest.raises(SettingError) as caught:
        load(GatewaySettings, [], env)
    assert "hunter2" not in str(caught.value)
    assert next(iter(env)).removeprefix("PDS_") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("a", "a"), ("a, b", "a,b"), ("org/a,b-1.5", "org/a,b-1.5"), ("none", None)]
)
def test_a_model_may_be_served_under_several_names(text: str, value: str | None) -> None:
    assert load(GatewaySettings, ["--served-model-name", text]).served_model_name == value


@pytest.mark.parametrize("text", ["a,", ",a", "a,,b", "a,a", "a, a", " "])
def test_names_are_not_empty_and_differ(text: str) -> None:
    with pytest.raises(SettingError, match="one name, or several different ones separated by commas"):
        load(GatewaySettings, [f"--served-model-name={text}"])
