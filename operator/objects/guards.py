"""What surrounds the pods: ServiceAccount, Services, PodDisruptionBudgets, NetworkPolicies. Pure."""

from __future__ import annotations

from typing import Any

from pdserve.operator.api.spec import ServiceSpec
from pdserve.operator.names import (
    API_PORT,
    DECODE,
    GATEWAY,
    METRICS_PORT,
    POOLS,
    PREFILL,
    REDIS,
    REDIS_PORT,
    child,
    labels,
    selector,
)

Json = dict[str, Any]


def service_account(service: str) -> Json:
    """An identity without any right: no pod talks to the API server."""
    metadata = {"name": service, "labels": labels(service)}
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }


def gateway_service(service: str) -> Json:
    """Where clients go: named like the PDService, port 80."""
    return _service(service, service, GATEWAY, "http", 80, API_PORT)


def redis_service(service: str) -> Json:
    """Where gateways and workers find the managed Redis."""
    return _service(child(service, REDIS), service, REDIS, REDIS, REDIS_PORT, REDIS_PORT)


def _service(name: str, service: str, role: str, port: str, number: int, target: int) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels(service, role)},
        "spec": {
            "selector": selector(service, role),
            "ports": [{"name": port, "port": number, "targetPort": target, "protocol": "TCP"}],
        },
    }


def disruption_budgets(service: str, api_version: str) -> list[Json]:
    """A drained node takes one pod of a role at a time."""
    return [
        {
            "apiVersion": api_version,
            "kind": "PodDisruptionBudget",
            "metadata": {"name": child(service, role), "labels": labels(service, role)},
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(service, role)}},
        }
        for role in (GATEWAY, *POOLS)
    ]


def network_policies(spec: ServiceSpec) -> list[Json]:
    """Who may connect to whom. Metrics are open to the cluster: Prometheus and the operator live elsewhere."""
    name = spec.name
    metrics: Json = {"ports": [_port(METRICS_PORT)], "from": [{"namespaceSelector": {}}]}
    transfer = [_port(number) for number in range(spec.first_port, spec.last_port + 1)]
    policies = [
        _policy(name, GATEWAY, [{"ports": [_port(API_PORT)]}, metrics]),
        _policy(name, PREFILL, [metrics, {"ports": transfer, "from": [_from(name, DECODE)]}]),
        _policy(name, DECODE, [metrics, {"ports": transfer, "from": [_from(name, PREFILL)]}]),
    ]
    if spec.redis_url is None:
        users = [_from(name, role) for role in (GATEWAY, *POOLS)]
        policies.append(_policy(name, REDIS, [{"ports": [_port(REDIS_PORT)], "from": users}]))
    return policies


def _policy(service: str, role: str, ingress: list[Json]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": child(service, role), "labels": labels(service, role)},
        "spec": {
            "podSelector": {"matchLabels": selector(service, role)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _from(service: str, role: str) -> Json:
    return {"podSelector": {"matchLabels": selector(service, role)}}


def _port(number: int) -> Json:
    return {"port": number, "protocol": "TCP"}
