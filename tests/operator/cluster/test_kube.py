"""The operator's client, against a small API server that throttles and conflicts."""

from __future__ import annotations

import asyncio
import json

import pytest
from api_server import FixedLogin, running

from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import ConflictError, GoneError, Kube, RefusedError, answer_of, path_of

POD = path_of("v1", "Pod", "shop", "p")


async def test_throttling_is_waited_out_as_the_server_asks() -> None:
    async with running() as (server, kube):
        server.objects[POD] = {"metadata": {"name": "p"}}
        server.answers = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
        assert await kube.get(POD) == {"metadata": {"name": "p"}}
        assert len(server.requests) == 3


async def test_throttling_without_end_is_an_error_after_a_bounded_number_of_tries() -> None:
    async with running() as (server, kube):
        server.answers = [(429, {"Retry-After": "0"})] * 20
        with pytest.raises(ClusterError, match="said 429 4 times"):
            await kube.get(POD)


@pytest.mark.parametrize(
    ("status", "error"), [(404, GoneError), (409, ConflictError), (422, RefusedError), (403, RefusedError)]
)
async def test_other_refusals_are_told_apart_and_not_repeated(status: int, error: type[ClusterError]) -> None:
    async with running() as (server, kube):
        server.answers = [(status, {})]
        with pytest.raises(error):
            await kube.get(POD)
        assert len(server.requests) == 1


def test_an_object_of_a_namespace_that_is_going_is_gone() -> None:
    causes = [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]
    refusal = {"reason": "Forbidden", "message": "…", "details": {"causes": causes}}
    with pytest.raises(GoneError):
        answer_of(403, json.dumps(refusal), "POST /")
    with pytest.raises(RefusedError):
        answer_of(403, json.dumps(refusal | {"details": {}}), "POST /")


async def test_a_server_that_is_away_is_a_cluster_error() -> None:
    async with running() as (_, kube):
        pass
    kube = Kube(FixedLogin("http://127.0.0.1:1"))
    with pytest.raises(ClusterError, match="does not answer"):
        await kube.get(POD)
    await kube.close()


async def test_deleting_what_is_gone_is_no_error() -> None:
    async with running() as (server, kube):
        server.answers = [(404, {})]
        await kube.delete(POD)


def test_paths_are_those_of_the_api() -> None:
    assert path_of("v1", "Pod", "shop", "p") == "/api/v1/namespaces/shop/pods/p"
    assert path_of("networking.k8s.io/v1", "NetworkPolicy", "shop") == (
        "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies"
    )
    assert path_of("apps/v1", "Deployment", None) == "/apis/apps/v1/deployments"


async def test_requests_that_are_refused_together_read_new_credentials_once() -> None:
    async with running() as (server, kube):
        server.objects[POD] = {"metadata": {"name": "p"}}
        server.answers = [(401, {})] * 3
        found = await asyncio.gather(*(kube.get(POD) for _ in range(3)))
        assert found == [{"metadata": {"name": "p"}}] * 3
        assert isinstance(kube.login, FixedLogin)
        assert kube.login.num_renewals == 1
