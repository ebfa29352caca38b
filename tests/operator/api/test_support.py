"""Every field of both schemas has an effect, or an object that sets it is told that it has none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_specs import merged

from pdserve.operator.api.policy import Policy, read_policy
from pdserve.operator.api.policy_schema import policy_spec
from pdserve.operator.api.schema_types import Schema
from pdserve.operator.api.service_schema import service_spec
from pdserve.operator.api.spec import ServiceSpec, SpecError, read_service
from pdserve.operator.api.support import POLICY_FIELDS_NOT_READ, SERVICE_FIELDS_NOT_READ, leaves
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.objects.plan import plan_of
from pdserve.operator.sizing.pools import observation, rollout_seen
from pdserve.operator.sizing.scaling import ScalingState, decide
from pdserve.operator.sizing.scaling_condition import scaling_condition
from pdserve.operator.status.conditions import Condition
from pdserve.operator.status.live import Live

Json = dict[str, Any]

FACTS = ClusterFacts(has_pod_monitors=True, has_prometheus_rules=True)
GPU = {"accelerator": {}, "rdma": {"resource": "rdma/hca"}}
SERVICE: Json = {
    "model": {"source": "hf://Qwen/Qwen3-8B", "authSecretRef": {"name": "hub", "key": "token"}},
    "prefill": GPU,
    "decode": GPU,
    "transfer": {"transport": "auto"},
    "redis": {"urls": ["redis://redis.example:6379/0"], "authSecretRef": {"name": "redis", "key": "password"}},
}
"""What a field is changed in: with devices, a hub model and an external Redis, so that each has something to act on."""
VALUES: dict[str, Any] = {
    "metrics.source": "prometheus",
    "model.source": "hf://Qwen/Qwen3-0.6B",
    "model.revision": "main",
    "model.cache.size": "40Gi",
    "model.dtype": "bfloat16",
    "redis.urls": ["redis://other.example:6379/0"],
    "scaling.policyRef": "nightly",
    "disaggregation.mode": "Never",
    "prefill.replicas": 3,
    "decode.replicas": 3,
    "transfer.portRange": "20000-20015",
    "prefill.nodeSelector": {"pool": "a"},
    "decode.nodeSelector": {"pool": "a"},
    "imagePullSecrets": [{"name": "registry"}],
    "budget.accelerators": 5,
    "budget.pods": 5,
}
"""Values of fields whose schema alone does not tell a good other one."""
ALSO: dict[str, Json] = {
    "prefill.replicas": {"scaling": {"mode": "Off"}},
    "decode.replicas": {"scaling": {"mode": "Off"}},
    "prefill.min": {"decode": {"min": 2}},
    "metrics.source": {"metrics": {"url": "http://prometheus:9090"}},
    "gateway.apiKeysSecretRef.name": {"gateway": {"apiKeysSecretRef": {"key": "keys.json"}}},
    "gateway.apiKeysSecretRef.key": {"gateway": {"apiKeysSecretRef": {"name": "keys"}}},
}
"""Other fields that must be set for this one to be allowed; they are set in what it is compared with, too."""
IN_BOTH_POOLS = ("engine.blockSize", "engine.kvDtype")
"""Fields that must be equal in both pools."""
REFUSED = {"gateway.apiKeysSecretRef.name", "gateway.apiKeysSecretRef.key", "observability.otlpEndpoint"}
ONE_VALUE = {"prefill.accelerator.count", "decode.accelerator.count"}
"""Fields whose schema allows one value."""


def other_value(path: str, node: Schema) -> Any:
    """A value that the schema allows and that is not the default."""
    if path in VALUES:
        return VALUES[path]
    default = node.get("default")
    if "enum" in node:
        return next(value for value in node["enum"] if value != default)
    if "items" in node:
        return [{"key": "k", "operator": "Exists"}]
    if node["type"] == "object":
        return {"spec": {"hostNetwork": True}} if path.endswith("podTemplate") else {"limits": {"cpu": "2"}}
    if node["type"] == "boolean":
        return not default
    if node["type"] in ("integer", "number"):
        return next(value for value in (0.5, 2, 60, 3) if is_allowed(node, value) and value != default)
    return "33s" if "h))+$" in node.get("pattern", "") else "other"


def is_allowed(node: Schema, value: float) -> bool:
    is_whole = node["type"] == "number" or isinstance(value, int)
    return is_whole and bool(node["minimum"] <= value <= node["maximum"])


def changed(spec: Json, path: str, value: Any) -> Json:
    """The spec with another value at a path, and with what must go with it."""
    made = copy.deepcopy(spec)
    field = path.partition(".")[2]
    for where in [f"{pool}.{field}" for pool in ("prefill", "decode")] if field in IN_BOTH_POOLS else [path]:
        *folders, name = where.split(".")
        inner = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return made


def service(spec: Json) -> ServiceSpec:
    return read_service({"metadata": {"name": "chat"}, "spec": spec})


def effects(spec: ServiceSpec, policy: Policy) -> list[Any]:
    """All that is made, decided and read because of a spec and a policy; the condition apart."""
    owner, live = Owner("chat", "shop", "u"), Live({}, [])
    plan = plan_of(spec, owner, FACTS, policy)
    later, state = decide(observation(live), spec, policy, ScalingState(), 0.0)
    looks = [bool(decide(observation(live), spec, policy, state, now_s)[0]) for now_s in (4.0, 6.0, 34.0)]
    return [plan, rollout_seen(spec, plan, live, 0.0), later, looks, spec.policy, spec.scaling]


def told(spec: ServiceSpec, policy: Policy) -> Condition:
    return scaling_condition(spec, policy, None, [])


POLICY_FIELDS = dict(leaves(policy_spec()))
SERVICE_FIELDS = dict(leaves(service_spec()))


@pytest.mark.parametrize("path", sorted(SERVICE_FIELDS.keys() - ONE_VALUE - REFUSED))
def test_a_field_of_a_service_has_an_effect_or_is_told(path: str) -> None:
    before = merged(SERVICE, ALSO.get(path, {}))
    after = changed(before, path, other_value(path, SERVICE_FIELDS[path]))
    policy = read_policy({})
    spec = service(after)
    has_effect = effects(spec, policy) != effects(service(before), policy)
    condition = told(spec, policy)
    is_told = condition.reason == "NotSupportedYet" and f"spec.{path}" in condition.message
    assert (has_effect, is_told) == (path not in SERVICE_FIELDS_NOT_READ, path in SERVICE_FIELDS_NOT_READ)


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_a_field_without_which_a_service_would_not_be_what_was_asked_for_is_refused(path: str) -> None:
    after = changed(merged(SERVICE, ALSO.get(path, {})), path, "other")
    with pytest.raises(SpecError, match=rf"^{path.rsplit('.', 1)[0]}\S* is not supported by this version"):
        service(after)


@pytest.mark.parametrize("path", sorted(POLICY_FIELDS))
def test_a_field_of_a_policy_has_an_effect_or_is_told(path: str) -> None:
    before = ALSO.get(path, {})
    empty = {"min": 0}
    named = {"policyRef": "nightly"}
    spec = service({"model": {"source": "demo"}, "prefill": empty, "decode": empty, "scaling": named})
    policy = read_policy(changed(before, path, other_value(path, POLICY_FIELDS[path])))
    has_effect = effects(spec, policy) != effects(spec, read_policy(before))
    condition = told(spec, policy)
    is_told = condition.reason == "NotSupportedYet" and f"{path} of ScalingPolicy nightly" in condition.message
    assert (has_effect, is_told) == (path not in POLICY_FIELDS_NOT_READ, path in POLICY_FIELDS_NOT_READ)


def test_what_is_told_names_the_field_and_leaves_the_mode_to_be_read() -> None:
    spec = service({"model": {"source": "demo"}, "decode": {"min": 1, "max": 4}})
    condition = told(spec, read_policy({}))
    assert (condition.type, condition.status) == ("ScalingActive", False)
    assert condition.message == (
        "spec.decode.max is not supported by this version: load does not change the number of workers. "
        "The operator keeps each pool at its min."
    )


def test_what_the_documentation_shows_of_the_example_is_what_is_told() -> None:
    root = Path(__file__).parents[3]
    condition = told(read_service(yaml.safe_load((root / "manifests/examples/demo.yaml").read_text())), read_policy({}))
    line = f"{condition.type}={condition.status} {condition.reason}: {condition.message}"
    assert (root / "docs" / "kubernetes.md").read_text().count(f"\n{line}\n") == 2


def test_defaults_that_a_server_fills_in_are_not_told() -> None:
    full = read_policy({name: node["default"] for name, node in POLICY_FIELDS.items() if "." not in name})
    spec = service({"model": {"source": "demo"}, "decode": {"min": 2, "max": 2}})
    assert full.not_supported == spec.not_supported == ()
    assert told(spec, full).reason == "Auto"


def test_the_schema_says_so_where_a_field_is_not_supported() -> None:
    for fields, not_read in ((POLICY_FIELDS, POLICY_FIELDS_NOT_READ), (SERVICE_FIELDS, SERVICE_FIELDS_NOT_READ)):
        assert not_read <= fields.keys()
        said = {path for path, node in fields.items() if node["description"].endswith("not supported by this version.")}
        assert said == not_read
