"""Everything a PDService is made of: spec → list of objects. Pure; `pdserve render` prints exactly this.

Settings lie in one immutable ConfigMap for each role and content: pods of an older template that restart keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.operator.api.policy import Policy, read_policy
from pdserve.operator.api.spec import ServiceSpec, SpecError
from pdserve.operator.digest import digest_of
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import APPLIED_ANNOTATION, GATEWAY, PREFILL, child, labels
from pdserve.operator.objects import guards, monitoring
from pdserve.operator.objects.deployments import deployment, with_replicas
from pdserve.operator.objects.pods import gateway_template, worker_template
from pdserve.operator.objects.process_settings import gateway_settings, worker_settings
from pdserve.operator.objects.redis import redis_deployment, redis_env
from pdserve.operator.objects.signature import kv_signature, mismatch

Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The objects that shall exist."""

    others: list[Json]
    """All but the three Deployments below, in the order they are applied."""
    gateway: Json
    pools: dict[str, Json]
    """Deployments of the pools by role, without a number of replicas."""
    signature: str
    has_managed_redis: bool


def plan_of(spec: ServiceSpec, owner: Owner, facts: ClusterFacts, policy: Policy | None = None) -> Plan:
    """All objects of a service; `policy`: its ScalingPolicy, else the default one.

    Raises:
        SpecError: the two pools could never exchange KV blocks.
    """
    image = spec.image or facts.default_image
    wrong = mismatch(spec, image)
    if wrong:
        raise SpecError(wrong)
    signature = kv_signature(spec, PREFILL, image)
    bus = redis_env(spec)
    gateway_map = _settings_map(spec.name, GATEWAY, gateway_settings(spec, owner.namespace, policy or read_policy({})))
    maps = {role: _settings_map(spec.name, role, worker_settings(spec, owner.namespace, role)) for role in spec.pools}
    pools = {
        role: worker_template(spec, pool, image, _name(maps[role]), bus, signature) for role, pool in spec.pools.items()
    }
    gateway = deployment(spec.name, GATEWAY, gateway_template(spec, image, _name(gateway_map), bus))
    others = [
        guards.service_account(spec.name),
        gateway_map,
        *maps.values(),
        *_bus(spec, image),
        guards.gateway_service(spec.name),
        *guards.disruption_budgets(spec.name, facts.disruption_budget_api),
        *guards.network_policies(spec),
        *_monitoring(spec, owner.namespace, facts),
    ]
    return Plan(
        others=[with_owner(made, owner) for made in others],
        gateway=with_replicas(gateway, spec.gateway.replicas),
        pools={role: deployment(spec.name, role, template) for role, template in pools.items()},
        signature=signature,
        has_managed_redis=spec.redis_url is None,
    )


def with_owner(made: Json, owner: Owner) -> Json:
    """The object as it is applied: with namespace, owner and the digest of everything."""
    metadata = made["metadata"] | {"namespace": owner.namespace, "ownerReferences": [owner.reference]}
    digest = digest_of(made | {"metadata": metadata})
    annotations = metadata.get("annotations", {}) | {APPLIED_ANNOTATION: digest}
    return made | {"metadata": metadata | {"annotations": annotations}}


def applied_digest(live: Json) -> str | None:
    """The digest that an object was last applied with."""
    digest = live["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION)
    return str(digest) if digest else None


def _settings_map(service: str, role: str, settings: dict[str, str]) -> Json:
    name = f"{child(service, role)}-{digest_of(settings, 8)}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels(service, role)},
        "immutable": True,
        "data": settings,
    }


def _name(made: Json) -> str:
    return str(made["metadata"]["name"])


def _bus(spec: ServiceSpec, image: str) -> list[Json]:
    return [guards.redis_service(spec.name), redis_deployment(spec, image)] if spec.redis_url is None else []


def _monitoring(spec: ServiceSpec, namespace: str, facts: ClusterFacts) -> list[Json]:
    made: list[Json] = []
    if spec.wants_pod_monitor and facts.has_pod_monitors:
        made.append(monitoring.pod_monitor(spec.name))
    if spec.wants_pod_monitor and facts.has_prometheus_rules:
        made.append(monitoring.prometheus_rule(spec, namespace))
    if spec.wants_dashboards and facts.has_pod_monitors:
        made.append(monitoring.dashboard(spec.name, namespace))
    return made
