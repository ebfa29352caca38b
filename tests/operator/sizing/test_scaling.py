"""The seam of the scaling law, and who goes when a pool shrinks."""

from __future__ import annotations

from typing import Any

from pdserve.operator.api.durations import seconds
from pdserve.operator.api.policy import read_policy
from pdserve.operator.api.spec import read_service
from pdserve.operator.sizing.scaling import Observation, PoolLoad, ScalingState, decide
from pdserve.operator.sizing.victims import load_of, victims
from pdserve.operator.status.pods_seen import PodSeen
from pdserve.readiness import Readiness, ReadyLoad, ReadyReason, read_readiness

POLICY = read_policy({})


def observation(replicas: int | None) -> Observation:
    return Observation({role: PoolLoad(replicas, 0, 0, 0) for role in ("prefill", "decode")})


def wanted(replicas: int | None, **spec: Any) -> list[tuple[str, int | None, int, bool]]:
    service = read_service({"metadata": {"name": "chat"}, "spec": {"model": {"source": "demo"}} | spec})
    decisions, _ = decide(observation(replicas), service, POLICY, ScalingState(), 0.0)
    return [(d.pool, d.current, d.wanted, d.is_applied) for d in decisions if d.is_change]


def test_a_pool_has_its_minimum() -> None:
    assert wanted(None, decode={"min": 2}) == [("prefill", None, 1, True), ("decode", None, 2, True)]
    assert wanted(5, decode={"min": 2}) == [("prefill", 5, 1, True), ("decode", 5, 2, True)]
    assert wanted(1) == []


def test_off_leaves_an_existing_number_alone_unless_one_is_given() -> None:
    assert wanted(5, scaling={"mode": "Off"}) == []
    assert wanted(None, scaling={"mode": "Off"}) == [("prefill", None, 1, True), ("decode", None, 1, True)]
    fixed = wanted(5, scaling={"mode": "Off"}, decode={"replicas": 3})
    assert fixed == [("decode", 5, 3, True)]


def test_advise_applies_nothing_but_the_first_size() -> None:
    assert wanted(5, scaling={"mode": "Advise"}) == [("prefill", 5, 1, False), ("decode", 5, 1, False)]
    assert all(is_applied for *_, is_applied in wanted(None, scaling={"mode": "Advise"}))


def test_load_counts_once_per_interval() -> None:
    service = read_service({"metadata": {"name": "chat"}, "spec": {"model": {"source": "demo"}}})
    first, state = decide(observation(3), service, POLICY, ScalingState(), 100.0)
    soon, same = decide(observation(3), service, POLICY, state, 104.0)
    later, _ = decide(observation(3), service, POLICY, same, 105.0)
    assert (len(first), len(soon), len(later)) == (2, 0, 2)
    other = read_service({"metadata": {"name": "chat"}, "spec": {"model": {"source": "tiny"}}})
    by_spec, _ = decide(observation(3), other, POLICY, state, 101.0)
    by_hand, _ = decide(observation(4), service, POLICY, state, 101.0)
    assert (len(by_spec), len(by_hand)) == (2, 2), "what people change counts at once"


def pod(name: str, *, is_ready: bool = True) -> PodSeen:
    return PodSeen(name, "decode", "t", "s", False, is_ready, True, None, None, "10.0.0.1", 0.0)


def test_starting_pods_go_first_then_the_least_loaded_and_silent_ones_last() -> None:
    pods = [pod("busy"), pod("silent"), pod("idle"), pod("starting", is_ready=False)]
    answers = {"busy": with_load(num_used_blocks=90), "idle": with_load(num_running=1)}
    assert [p.name for p in victims(pods, answers, 4)] == ["starting", "idle", "busy", "silent"]


def with_load(**numbers: int) -> Readiness:
    return Readiness(ready=True, reason=ReadyReason.READY, message="…", load=ReadyLoad(**numbers))


def test_load_counts_blocks_in_use_and_sequences_of_whatever_state() -> None:
    assert load_of(with_load(num_used_blocks=9, num_running=3, num_waiting=1)) == 13.0


def test_a_worker_that_does_not_tell_its_load_counts_as_fully_loaded() -> None:
    assert load_of(None) == load_of(read_readiness(b"ok")) == float("inf")


def test_durations_add_up() -> None:
    assert [seconds(text) for text in ("500ms", "1m30s", "2h", "1.5s")] == [0.5, 90.0, 7200.0, 1.5]
