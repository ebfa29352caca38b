"""The last test: what the operator was seen doing in the whole run is what it may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.harness import Cluster

USER = "system:serviceaccount:pdserve-system:pdserve-operator"
Right = tuple[str, str, str]
"""(group, resource, verb)."""

_APPLIED = [
    ("apps", "deployments"), ("", "services"), ("", "configmaps"), ("", "serviceaccounts"),
    ("policy", "poddisruptionbudgets"), ("networking.k8s.io", "networkpolicies"),
]  # fmt: skip
_MONITORING = [("monitoring.coreos.com", "podmonitors"), ("monitoring.coreos.com", "prometheusrules")]
REASONS: dict[Right, str] = {
    **{(group, kind, "create"): "server-side apply of a new object needs it, but is audited as patch"
       for group, kind in _APPLIED},
    **{(group, kind, verb): "this cluster has no Prometheus operator"
       for group, kind in _MONITORING for verb in ("list", "create", "patch", "delete")},
    **{(group, kind, "delete"): "only when a spec no longer wants an object, such as a managed Redis"
       for group, kind in _APPLIED},
    ("", "pods", "patch"): "only when a pool shrinks",
    ("", "pods", "delete"): "only when a pool shrinks on a server older than 1.22",
    ("pdserve.dev", "scalingpolicies", "get"): "only for services with a policyRef",
}  # fmt: skip
"""Rights that a run need not show, and why they are granted all the same."""


def test_rights_used_are_rights_granted(cluster: Cluster, record_property: Callable[[str, object], None]) -> None:
    used, granted = rights_used(cluster), rights_granted(cluster)
    assert used - granted == set(), "denied, or granted by accident"
    unexplained = granted - used - REASONS.keys()
    assert unexplained == set()
    record_property("headline", f"RBAC {len(used)} rights used of {len(granted)}, {len(granted - used)} explained")
    print()
    for right in sorted(granted - used):
        print(f"  not seen: {'/'.join(right)} ({REASONS[right]})")


def rights_used(cluster: Cluster) -> set[Right]:
    used = set()
    for event in cluster.plane.audit():
        if event["user"]["username"] == USER and "objectRef" in event:
            reference = event["objectRef"]
            resource = "/".join(filter(None, [reference["resource"], reference.get("subresource")]))
            used.add((reference.get("apiGroup", ""), resource, event["verb"]))
            assert event["responseStatus"]["code"] != 403 or "being terminated" in str(event), event
    return used


def rights_granted(cluster: Cluster) -> set[Right]:
    base = "/apis/rbac.authorization.k8s.io/v1"
    roles: list[dict[str, Any]] = [
        cluster.get(f"{base}/clusterroles/pdserve-operator"),
        cluster.get(f"{base}/namespaces/pdserve-system/roles/pdserve-operator"),
    ]
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
