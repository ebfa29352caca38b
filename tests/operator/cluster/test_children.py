"""What is applied, deleted and drawn once."""

from __future__ import annotations

from typing import Any

from api_server import running

from pdserve.operator.cluster.children import Children
from pdserve.operator.cluster.kube import path_of
from pdserve.operator.cluster.scaler import needs_owner_of_replicas
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.objects.plan import with_owner


async def test_the_same_object_is_applied_once() -> None:
    async with running() as (server, kube):
        owner = Owner("chat", "shop", "u")
        children = Children(kube, owner, ClusterFacts())
        item = with_owner(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}, owner
        )
        assert await children.apply(item)
        assert not await children.apply(item)
        assert await children.apply(with_owner(item | {"data": {"a": "2"}}, owner))
        assert [method for method, _ in server.requests] == ["PATCH", "PATCH"]


async def test_a_drawn_password_is_never_drawn_again() -> None:
    async with running() as (server, kube):
        path = path_of("v1", "Secret", "shop", "chat-redis")
        await Children(kube, Owner("chat", "shop", "u"), ClusterFacts()).ensure_password()
        drawn = server.objects[path]
        await Children(kube, Owner("chat", "shop", "u"), ClusterFacts()).ensure_password()
        assert server.objects[path] == drawn


def test_a_number_that_only_the_main_manager_owns_would_be_lost() -> None:
    def live(*managers: str) -> dict[str, Any]:
        fields = [{"manager": name, "fieldsV1": {"f:spec": {"f:replicas": {}}}} for name in managers]
        return {"metadata": {"managedFields": fields}}

    assert not needs_owner_of_replicas(live()), "a default has no owner, and stays"
    assert needs_owner_of_replicas(live("pdserve-operator"))
    assert not needs_owner_of_replicas(live("pdserve-operator", "pdserve-scaling"))
    assert not needs_owner_of_replicas(live("kubectl"))
