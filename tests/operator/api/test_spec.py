"""Specs: defaults, refusals with a sentence, and the same rules that CEL states."""

from __future__ import annotations

from typing import Any

import pytest
from bad_specs import BAD_SPECS, merged

from pdserve.operator.api.policy import read_policy
from pdserve.operator.api.spec import SpecError, read_service

MINIMAL: dict[str, Any] = {"model": {"source": "demo"}}


def service(spec: dict[str, Any], name: str = "chat") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec}


def test_ten_lines_have_a_default_for_everything_else() -> None:
    spec = read_service(service(MINIMAL))
    assert [pool.min for pool in spec.pools.values()] == [1, 1]
    assert (spec.ttft_s, spec.tpot_s, spec.lease_s, spec.deadline_s) == (2.0, 0.1, 10.0, 600.0)
    assert (spec.first_port, spec.last_port) == (18500, 18515)
    assert spec.redis_url is None
    assert spec.scaling == "Auto"


@pytest.mark.parametrize(("change", "sentence"), BAD_SPECS)
def test_a_broken_rule_is_refused_with_its_sentence(change: dict[str, Any], sentence: str) -> None:
    name = change.get("name", "chat")
    with pytest.raises(SpecError) as caught:
        read_service(service(merged(MINIMAL, change.get("spec", {})), name))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "spec.model is required"),
        (MINIMAL | {"prefil": {}}, "spec.prefil is unknown"),
        (MINIMAL | {"slo": {"ttft": "5"}}, "spec.slo.ttft"),
        (MINIMAL | {"gateway": {"replicas": True}}, "spec.gateway.replicas must be of type integer"),
        (MINIMAL | {"prefill": {"min": -1}}, "spec.prefill.min must be between 0 and 1024"),
        (MINIMAL | {"scaling": {"mode": "Sometimes"}}, "spec.scaling.mode must be one of Auto, Advise, Off"),
        (MINIMAL | {"redis": {"urls": []}}, "spec.redis.urls must have 1 to 1 items"),
        (MINIMAL | {"model": {"source": "x" * 600}}, "must have"),
    ],
)
def test_what_the_schema_forbids_is_named_by_its_path(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_service(service(spec))
    assert sentence in str(caught.value)


def test_many_mistakes_make_one_bounded_message() -> None:
    with pytest.raises(SpecError) as caught:
        read_service(service(MINIMAL | {f"unknown{index}": 1 for index in range(500)}))
    assert "(and 495 more)" in str(caught.value)
    assert len(str(caught.value)) < 5000


def test_null_means_left_out() -> None:
    assert read_service(service(MINIMAL | {"slo": {"ttft": None}})).ttft_s == 2.0


def test_the_default_policy_is_an_empty_one() -> None:
    policy = read_policy({})
    assert (policy.interval_s, policy.hold_requests, policy.hold_timeout_s) == (5.0, 100, 120.0)


def test_a_policy_that_asks_prometheus_needs_its_url() -> None:
    with pytest.raises(SpecError, match=r"metrics\.url is needed"):
        read_policy({"metrics": {"source": "prometheus"}})
