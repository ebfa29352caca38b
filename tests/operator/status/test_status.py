"""Status: columns, conditions and reasons; and no change without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pdserve.operator.status.conditions import Condition, merge_conditions, shorten, transitions
from pdserve.operator.status.health import Health, role_health
from pdserve.operator.status.pods_seen import PodSeen, seen
from pdserve.operator.status.reasons import Reason
from pdserve.operator.status.status import PoolCount, StatusFacts, refused_status, service_status
from pdserve.readiness import Readiness, ReadyReason, read_readiness

Json = dict[str, Any]
NOW, LATER = "2026-01-31T12:00:00Z", "2026-01-31T13:00:00Z"
READY = Health(True, Reason.READY, "All pods are ready.")
SCALING = Condition("ScalingActive", True, Reason.AUTO, "…")


def facts(rollout: Reason = Reason.COMPLETE, **health: Health) -> StatusFacts:
    return StatusFacts(
        health={"gateway": READY, "prefill": READY, "decode": READY, "redis": READY} | health,
        pools={role: PoolCount(2, 2, 0, 0, 2) for role in ("prefill", "decode")},
        rollout_reason=rollout,
        rollout_message="…",
        scaling=SCALING,
        signature="abc",
        url="http://chat.shop.svc",
        surge_problem=None,
    )


def condition(status: Json, kind: str) -> Json:
    return next(item for item in status["conditions"] if item["type"] == kind)


def pod(**changes: Any) -> Json:
    container = {"name": "decode", "image": "i", "started": True, "restartCount": 0, "state": {"running": {}}}
    base: Json = {
        "metadata": {
            "name": "chat-decode-abc-xyz",
            "labels": {"pdserve.dev/role": "decode", "pdserve.dev/template": "t"},
            "creationTimestamp": NOW,
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": NOW}],
            "containerStatuses": [container | changes.pop("container", {})],
        },
    }
    base["status"] |= changes
    return base


def health_of(
    *pods: Json, wanted: int = 1, answers: dict[str, Readiness] | None = None, deployment: Json | None = None
) -> Health:
    records: list[PodSeen] = seen(pods)
    return role_health("decode", wanted, deployment, records, answers or {}, records[0].created_s if records else 0.0)


def test_the_same_facts_give_the_same_status() -> None:
    first = service_status({}, facts(), 1, NOW)
    assert service_status(first, facts(), 1, LATER) == first


def test_ready_needs_the_newest_revision_everywhere() -> None:
    assert condition(service_status({}, facts(), 1, NOW), "Ready")["status"] == "True"
    rolling = service_status({}, facts(Reason.ROLLING_OUT), 1, NOW)
    assert condition(rolling, "Ready")["status"] == "False"
    assert condition(rolling, "Progressing")["status"] == "True"
    stuck = service_status({}, facts(Reason.NO_ROOM_TO_SURGE), 1, NOW)
    assert (condition(stuck, "Progressing")["status"], condition(stuck, "Progressing")["reason"]) == (
        "False", "NoRoomToSurge"
    )  # fmt: skip


def test_the_columns_have_what_they_show() -> None:
    status = service_status({}, facts(), 1, NOW)
    assert status["pools"]["prefill"]["display"] == "2/2"
    assert (status["kvSignature"], status["url"]) == ("abc", "http://chat.shop.svc")


def test_a_broken_role_comes_before_one_that_only_starts() -> None:
    status = service_status(
        {}, facts(gateway=Health(False, Reason.STARTING, "…"), decode=Health(False, Reason.CRASH_LOOPING, "…")), 1, NOW
    )
    assert condition(status, "Ready")["reason"] == "CrashLooping"
    assert condition(status, "Degraded")["status"] == "True"


def test_transition_times_change_with_the_status_alone() -> None:
    before = merge_conditions([], [Condition("Ready", False, Reason.STARTING, "a")], 1, NOW)
    other_reason = merge_conditions(before, [Condition("Ready", False, Reason.CRASH_LOOPING, "b")], 2, LATER)
    assert other_reason[0]["lastTransitionTime"] == NOW
    assert transitions(before, other_reason) == other_reason
    ready = merge_conditions(other_reason, [Condition("Ready", True, Reason.READY, "c")], 2, LATER)
    assert ready[0]["lastTransitionTime"] == LATER


def test_a_refused_spec_keeps_what_is_known_of_the_last_good_one() -> None:
    good = service_status({}, facts(), 1, NOW)
    refused = refused_status(good, Reason.INVALID_SPEC, "min is above max.", 2, LATER)
    assert refused["pools"] == good["pools"]
    assert condition(refused, "Ready") == condition(good, "Ready")
    assert condition(refused, "Degraded")["message"].endswith("The last good state keeps running.")
    assert refused_status(refused, Reason.INVALID_SPEC, "min is above max.", 2, LATER) == refused


def test_a_megabyte_of_error_text_does_not_grow_an_object() -> None:
    status: Json = {}
    for _ in range(50):
        status = refused_status(status, Reason.INVALID_SPEC, "x" * 1_000_000, 1, NOW)
    assert len(str(status)) < 20_000
    assert len(shorten("y" * 5000)) == 1000


@pytest.mark.parametrize(
    ("container", "reason"),
    [
        ({"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub"'}}}, "MissingSecret"),
        ({"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'configmap "x"'}}}, "MissingConfig"),
        ({"state": {"waiting": {"reason": "ImagePullBackOff"}}}, "ImagePullFailed"),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1, "message": "first\nthere is no model"}},
            },
            "CrashLooping",
        ),
    ],
)  # fmt: skip
def test_each_failure_of_a_container_has_a_reason(container: Json, reason: str) -> None:
    assert health_of(pod(container=container)).reason == reason


def test_the_last_words_of_a_crash_are_in_the_message() -> None:
    ended = {"terminated": {"exitCode": 3, "message": "first\nthere is no model"}}
    crash = pod(container={"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended})
    assert "exits with 3 (there is no model)" in health_of(crash).message


def test_no_node_is_no_capacity() -> None:
    scheduled = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": NOW,
        "message": "0/3 nodes are available: Insufficient nvidia.com/gpu.",
    }  # fmt: skip
    health = health_of(pod(conditions=[scheduled], containerStatuses=[], podIP=""))
    assert health.reason == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in health.message


@pytest.mark.parametrize(
    ("said", "reason", "is_broken"),
    [
        (ReadyReason.STARTING, "Starting", False),
        (ReadyReason.BUS_UNREACHABLE, "RedisUnavailable", True),
        (ReadyReason.NO_TRANSPORT, "TransfersFailing", True),
        (ReadyReason.STEP_HANGS, "StepHangs", True),
        (ReadyReason.NO_WORKERS, "Starting", False),
        (ReadyReason.DRAINING, "Draining", False),
        (ReadyReason.UNKNOWN, "Unknown", False),
    ],
)
def test_the_reason_that_a_pod_gives_decides_and_its_message_is_shown(
    said: ReadyReason, reason: str, is_broken: bool
) -> None:
    waiting = pod()
    answer = Readiness(ready=False, reason=said, message="Nothing of this sentence decides.")
    health = health_of(waiting, answers={waiting["metadata"]["name"]: answer})
    assert (health.reason, health.message) == (reason, "decode: Nothing of this sentence decides.")
    assert health.is_broken == is_broken


def test_every_reason_of_a_process_that_is_not_ready_has_one_of_a_condition() -> None:
    for said in set(ReadyReason) - {ReadyReason.READY}:
        waiting = pod()
        answer = Readiness(ready=False, reason=said, message="…")
        assert health_of(waiting, answers={waiting["metadata"]["name"]: answer}).message == "decode: …"


def test_a_pod_whose_answer_has_no_known_form_is_not_judged_by_its_words() -> None:
    waiting = pod()
    answer = read_readiness(b"the bus does not answer, and a transfer failed")
    assert health_of(waiting, answers={waiting["metadata"]["name"]: answer}).reason == "Unknown"


def test_a_quota_is_told_before_what_passes_by_itself() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    waiting = pod()
    answer = Readiness(ready=False, reason=ReadyReason.STARTING, message="…")
    health = health_of(
        waiting, wanted=2, answers={waiting["metadata"]["name"]: answer},
        deployment={"status": {"conditions": [failure]}},
    )  # fmt: skip
    assert health.reason == "CannotCreatePods"


def test_a_pod_that_has_not_been_asked_is_starting() -> None:
    assert health_of(pod()).reason == "Starting"


def test_refused_pods_are_not_waited_for() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    health = health_of(deployment={"status": {"conditions": [failure]}})
    assert health.reason == "CannotCreatePods"


def test_the_documentation_says_what_to_do_about_every_reason() -> None:
    table = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert [reason for reason in Reason if not re.search(rf"^\| .*`{reason}`.* \|.*\|.*\|$", table, re.MULTILINE)] == []


def test_a_pool_of_none_is_ready() -> None:
    assert health_of(wanted=0) == Health(True, Reason.SCALED_TO_ZERO, "No decode pod is wanted.")
