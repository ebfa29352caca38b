"""The CEL rules on a server that has CEL: accepted, and each says the sentence that the operator's own check says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.binaries import find, find_control_plane
from cluster.crd_server import crd_server
from cluster.harness import ROOT, wait_for
from cluster.network import private_network

sys.path.insert(0, str(Path(__file__).parents[1] / "operator"))

import yaml
from bad_specs import BAD_SPECS, GOOD_SPECS, merged

from pdserve.operator.api.crds import all_crds
from pdserve.operator.api.spec import read_service

Json = dict[str, Any]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SERVICES = "/apis/pdserve.dev/v1alpha1/namespaces/default/pdservices"
POLICIES = "/apis/pdserve.dev/v1alpha1/namespaces/default/scalingpolicies"
STRICT = {"fieldValidation": "Strict"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """With both CustomResourceDefinitions installed, strictly validated."""
    binaries, binary = find_control_plane(), find("crdserver")
    if isinstance(binaries, str) or binary is None:
        pytest.skip(f"NO CEL TESTS: {binaries if isinstance(binaries, str) else 'no crdserver in the cache folder'}")
    folder = tmp_path_factory.mktemp("crd") / "server"
    with private_network(), crd_server(binaries["etcd"], binary, folder) as client:
        for crd in all_crds():
            response = client.post(CRDS, json=crd, params=STRICT)
            assert response.status_code == 201, response.text
        wait_for(lambda: client.get(SERVICES).status_code == 200, 20, "the resources are served")
        wait_for(lambda: client.get(POLICIES).status_code == 200, 20, "the resources are served")
        yield client


def service(change: Json) -> Json:
    name = change.get("name", "chat")
    spec = merged({"model": {"source": "demo"}}, change.get("spec", {}))
    return {"apiVersion": "pdserve.dev/v1alpha1", "kind": "PDService", "metadata": {"name": name}, "spec": spec}


def test_each_broken_rule_is_refused_with_its_sentence(server: httpx.Client) -> None:
    for change, sentence in BAD_SPECS:
        response = server.post(SERVICES, json=service(change), params={"dryRun": "All"} | STRICT)
        assert response.status_code == 422, (change, response.text)
        assert sentence in response.json()["message"], change


def test_what_the_operator_accepts_the_server_accepts_too(server: httpx.Client) -> None:
    for change in GOOD_SPECS:
        read_service(service(change))
        response = server.post(SERVICES, json=service(change), params={"dryRun": "All"} | STRICT)
        assert response.status_code == 201, (change, response.text)


def test_defaults_of_the_server_are_the_operators(server: httpx.Client) -> None:
    made = service({"spec": {"prefill": {"accelerator": {}}, "redis": {"urls": ["redis://host:1/0"]}}})
    stored = server.post(SERVICES, json=made, params={"dryRun": "All"}).json()
    assert read_service(stored) == read_service(made)


def test_a_policy_with_prometheus_needs_a_url(server: httpx.Client) -> None:
    policy = {
        "apiVersion": "pdserve.dev/v1alpha1", "kind": "ScalingPolicy", "metadata": {"name": "p"},
        "spec": {"metrics": {"source": "prometheus"}},
    }  # fmt: skip
    response = server.post(POLICIES, json=policy, params=STRICT)
    assert response.status_code == 422
    assert "metrics.url is needed" in response.json()["message"]


@pytest.mark.parametrize("file", sorted((ROOT / "manifests" / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_accepted_strictly(server: httpx.Client, file: Path) -> None:
    for item in yaml.safe_load_all(file.read_text()):
        if item["apiVersion"].startswith("pdserve.dev"):
            path = SERVICES if item["kind"] == "PDService" else POLICIES
            response = server.post(path, json=item, params={"dryRun": "All"} | STRICT)
            assert response.status_code == 201, response.text
