"""The test hooks: absent unless asked for, refused in production, counted, and strict about their object."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pdserve.errors import SettingError
from pdserve.faults import DELAYS, MESSAGE_TYPES, STAGES, Faults, MessageAction, MessageFault

EVERYTHING: dict[str, Any] = {
    "start_delay_s": 1.0,
    "prefill_delay_s": 2.0,
    "step_delay_s": 3.0,
    "pull_delay_s": 4.0,
    "publish_delay_s": 5.0,
    "fail": {"stage": "copy", "times": 2},
    "drop": {"message": "KvReady", "times": 1},
    "duplicate": {"message": "TokenBatch", "times": 1},
    "reorder": {"message": "KvRelease", "times": 1},
    "delay": {"message": "Started", "s": 0.5, "times": 1},
    "corrupt_block": {"times": 1},
}


@pytest.mark.parametrize("env", [{}, {"PDS_FAULTS": ""}, {"PDS_FAULTS": "0"}])
def test_without_the_setting_there_are_no_hooks(env: dict[str, str]) -> None:
    assert Faults.from_env(env) is None


def test_one_switches_the_hooks_on_with_no_fault_and_warns_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        faults = Faults.from_env({"PDS_FAULTS": "1"})
    assert faults is not None
    assert faults.get() == {}
    assert "TEST HOOKS ARE ON" in caplog.text


def test_an_object_in_the_environment_is_taken() -> None:
    faults = Faults.from_env({"PDS_FAULTS": json.dumps(EVERYTHING)})
    assert faults is not None
    assert [faults.delay_s(name) for name in DELAYS] == [1, 2, 3, 4, 5]


def test_production_refuses_the_hooks() -> None:
    with pytest.raises(SettingError, match="PDS_PRODUCTION"):
        Faults.from_env({"PDS_FAULTS": "1", "PDS_PRODUCTION": "1"})
    assert Faults.from_env({"PDS_PRODUCTION": "1"}) is None


def test_get_adds_the_times_left_and_its_answer_can_be_put_back() -> None:
    faults = Faults(EVERYTHING)
    assert faults.should_fail("copy")
    assert faults.get()["fail"] == {"stage": "copy", "times": 2, "times_left": 1}
    faults.put(faults.get())
    assert faults.get()["fail"]["times_left"] == 2


def test_a_fault_happens_so_often_and_no_more() -> None:
    faults = Faults({"fail": {"stage": "post", "times": 2}, "corrupt_block": {"times": 1}})
    assert [faults.should_fail("post") for _ in range(4)] == [True, True, False, False]
    assert [faults.take("corrupt_block") for _ in range(2)] == [True, False]
    assert faults.get()["fail"]["times_left"] == 0


def test_a_fault_without_times_never_ends() -> None:
    faults = Faults({"fail": {"stage": "verify"}})
    assert all(faults.should_fail("verify") for _ in range(1000))
    assert faults.get()["fail"] == {"stage": "verify", "times_left": None}


def test_only_the_named_stage_fails() -> None:
    faults = Faults({"fail": {"stage": "copy", "times": 1}})
    assert [stage for stage in STAGES if faults.should_fail(stage)] == ["copy"]


def test_only_the_named_messages_are_touched() -> None:
    faults = Faults(EVERYTHING)
    decisions = {name: faults.on_message(name) for name in MESSAGE_TYPES}
    assert {name: decision for name, decision in decisions.items() if decision} == {
        "KvReady": MessageFault(MessageAction.DROP),
        "TokenBatch": MessageFault(MessageAction.DUPLICATE),
        "KvRelease": MessageFault(MessageAction.REORDER),
        "Started": MessageFault(MessageAction.DELAY, 0.5),
    }
    assert all(faults.on_message(name) is None for name in MESSAGE_TYPES)


def test_a_fault_may_be_a_list() -> None:
    faults = Faults({"drop": [{"message": "Started", "times": 1}, {"message": "Finished", "times": 1}]})
    assert faults.on_message("Started")
    assert faults.on_message("Finished")
    assert [item["times_left"] for item in faults.get()["drop"]] == [0, 0]


def test_put_replaces_the_whole_object() -> None:
    faults = Faults(EVERYTHING)
    faults.put({"step_delay_s": 0.25})
    assert faults.get() == {"step_delay_s": 0.25}
    assert not faults.should_fail("copy")


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ({"step_delay": 1}, ["step_delay", "did you mean step_delay_s"]),
        ({"step_delay_s": "1"}, ["step_delay_s", "'1'", "number of seconds >= 0"]),
        ({"step_delay_s": -1}, ["step_delay_s", "-1"]),
        ({"step_delay_s": float("nan")}, ["step_delay_s", "nan"]),
        ({"clock_offset_s": 1}, ["clock_offset_s", "one of start_delay_s"]),
        ({"step_delay_s": True}, ["step_delay_s", "True"]),
        ({"fail": {"stage": "copying"}}, ["fail.stage", "'copying'", "did you mean copy"]),
        ({"fail": {"times": 1}}, ["fail.stage", "a value"]),
        ({"fail": {"stage": "copy", "times": -1}}, ["fail.times", "-1"]),
        ({"fail": {"stage": "copy", "times": 1.5}}, ["fail.times", "1.5"]),
        ({"fail": {"stage": "copy", "time": 1}}, ["fail.time", "did you mean times"]),
        ({"drop": {"message": "KVReady"}}, ["drop.message", "did you mean KvReady"]),
        ({"drop": "KvReady"}, ["drop", "an object with message, times"]),
        ({"drop": []}, ["drop", "at least one"]),
        ({"delay": {"message": "Started"}}, ["delay.s"]),
        ({"delay": {"message": "Started", "s": -1}}, ["delay.s", "-1"]),
        ([], ["a JSON object"]),
    ],
)
def test_a_bad_object_is_named_and_changes_nothing(obj: Any, words: list[str]) -> None:
    faults = Faults({"pull_delay_s": 1})
    with pytest.raises(SettingError) as caught:
        faults.put(obj)
    for word in words:
        assert word in str(caught.value)
    assert faults.get() == {"pull_delay_s": 1.0}


@pytest.mark.parametrize("text", ["yes", "{", "[1]", "2"])
def test_a_bad_environment_value_is_an_error(text: str) -> None:
    with pytest.raises(SettingError, match="1 or a JSON object"):
        Faults.from_env({"PDS_FAULTS": text})
