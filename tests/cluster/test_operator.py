"""The operator among others: quiet when nothing changes, one at a time, quick with many services."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import yaml

from cluster.harness import Cluster, Json, Namespace, pdservice, wait_for

NAMESPACE = "pdserve-system"
USER = f"system:serviceaccount:{NAMESPACE}:pdserve-operator"
WRITES = {"create", "update", "patch", "delete", "deletecollection"}
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/pdserve-operator"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/pdserve-operator"


def writes_by_operator(cluster: Cluster, since: int) -> Counter[tuple[str, str, str]]:
    """(verb, resource, source address) → number, in the audit log from a line on."""
    return Counter(
        (event["verb"], event["objectRef"]["resource"], event["sourceIPs"][0])
        for event in cluster.plane.audit()[since:]
        if event["user"]["username"] == USER and event["verb"] in WRITES
    )


@pytest.mark.parametrize("quiet_s", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_is_written_while_nothing_changes(
    namespace: Namespace, quiet_s: float, record_property: Callable[[str, object], None]
) -> None:
    cluster = namespace.cluster
    namespace.apply(pdservice("chat"))
    namespace.wait_settled("chat")
    time.sleep(3)
    since = len(cluster.plane.audit())
    time.sleep(quiet_s)
    written = writes_by_operator(cluster, since)
    assert {resource for _, resource, _ in written} == {"leases"}
    record_property("headline", f"{sum(written.values())} writes in {quiet_s} quiet s, all of the Lease")


@pytest.fixture
def two_operators(cluster: Cluster) -> Iterator[None]:
    cluster.kubectl("-n", NAMESPACE, "scale", "deployment/pdserve-operator", "--replicas=2")
    wait_for(lambda: cluster.get(DEPLOYMENT)["status"].get("readyReplicas") == 2, 60, "two operators run")
    yield
    cluster.kubectl("-n", NAMESPACE, "scale", "deployment/pdserve-operator", "--replicas=1")


@pytest.mark.usefixtures("two_operators")
def test_of_two_operators_one_acts_and_the_other_takes_over(namespace: Namespace) -> None:
    cluster = namespace.cluster
    since = len(cluster.plane.audit())
    namespace.apply(idle_service("first"))
    wait_for(lambda: namespace.deployment("first-decode"), 20, "one of them acts")
    time.sleep(2)
    actors = {address for (_, resource, address) in writes_by_operator(cluster, since) if resource != "leases"}
    assert len(actors) == 1
    holder = cluster.get(LEASE)["spec"]["holderIdentity"]
    pods = cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    leader = next(pod for pod in pods if pod["status"].get("podIP") in actors)
    cluster.kubectl("-n", NAMESPACE, "delete", "pod", leader["metadata"]["name"], "--wait=false")
    wait_for(lambda: cluster.get(LEASE)["spec"]["holderIdentity"] not in ("", holder), 30, "another one leads")
    since = len(cluster.plane.audit())
    namespace.apply(idle_service("second"))
    wait_for(lambda: namespace.deployment("second-decode"), 30, "the other one acts")
    others = {address for (_, resource, address) in writes_by_operator(cluster, since) if resource != "leases"}
    assert len(others) == 1
    assert others != actors


@pytest.mark.parametrize("num", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_many_services_get_their_children_within_a_minute(
    namespace: Namespace, num: int, record_property: Callable[[str, object], None]
) -> None:
    services = [idle_service(f"s{index}") for index in range(num)]
    began_s = time.monotonic()
    namespace.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(services))
    applied_s = time.monotonic() - began_s
    wait_for(lambda: num_deployments(namespace) == 3 * num, 60 + applied_s, f"{3 * num} Deployments")
    elapsed_s = time.monotonic() - began_s
    kinds = "deploy,svc,cm,sa,pdb,netpol"
    total = sum(name != "" and "default" not in name for name in names(namespace, kinds))
    taken_s = elapsed_s - applied_s
    record_property("headline", f"{total} children of {num} services within {taken_s:.0f} s of apply")
    assert total >= 13 * num
    assert elapsed_s - applied_s < 60


def num_deployments(namespace: Namespace) -> int:
    return len([name for name in names(namespace, "deploy") if name.startswith("deployment")])


def names(namespace: Namespace, kinds: str) -> list[str]:
    return namespace.kubectl("get", kinds, "-o", "name").splitlines()


def idle_service(name: str) -> Json:
    """Objects without processes: no node takes its pods."""
    nowhere = {"nodeSelector": {"nowhere": "true"}}
    made = pdservice(name, gateway={"podTemplate": {"spec": nowhere}}, prefill=nowhere, decode=nowhere)
    made["spec"]["redis"] = {"urls": ["redis://redis.example:6379/0"]}
    return made
