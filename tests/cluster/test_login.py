"""Ways to log in to a real API server: a token in a file that rotates, an exec plugin, two merged files."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.harness import Cluster
from pdserve.operator.cluster.kube import Kube, RefusedError, path_of
from pdserve.operator.cluster.login import ClusterLogin

Json = dict[str, Any]

NAME = "login-test"
SECRETS = path_of("v1", "Secret", "kube-system")
PLUGIN = """import json, os, pathlib, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
token = pathlib.Path(sys.argv[1]).read_text()
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": token}}))
"""


@pytest.fixture(scope="module")
def token(bare_cluster: Cluster) -> Iterator[str]:
    """A ServiceAccount's token, issued by the server; the account may list pods."""
    account = f"/api/v1/namespaces/kube-system/serviceaccounts/{NAME}"
    bare_cluster.kubectl("-n", "kube-system", "create", "serviceaccount", NAME)
    bare_cluster.kubectl("create", "clusterrole", NAME, "--verb=list", "--resource=pods")
    to = (f"--clusterrole={NAME}", f"--serviceaccount=kube-system:{NAME}")
    bare_cluster.kubectl("create", "clusterrolebinding", NAME, *to)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    response = bare_cluster.client.post(f"{account}/token", json=asked)
    assert response.is_success, response.text
    yield response.json()["status"]["token"]
    bare_cluster.kubectl("delete", f"clusterrolebinding/{NAME}", f"clusterrole/{NAME}")
    bare_cluster.kubectl("-n", "kube-system", "delete", "serviceaccount", NAME)


@pytest.fixture
def use(bare_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Json], None]:
    """Logs in as this user: the cluster is named in one file, the user and its context in another."""
    config = yaml.safe_load(bare_cluster.plane.kubeconfig.read_text())

    def write(user: Json) -> None:
        clusters, users = tmp_path / "clusters", tmp_path / "users"
        head = {"apiVersion": "v1", "kind": "Config"}
        clusters.write_text(yaml.safe_dump(head | {"clusters": config["clusters"]}))
        context = {"name": "x", "context": {"cluster": config["clusters"][0]["name"], "user": "u"}}
        mine = {"users": [{"name": "u", "user": user}], "contexts": [context], "current-context": "x"}
        users.write_text(yaml.safe_dump(head | mine))
        monkeypatch.setenv("KUBECONFIG", f"{clusters}{os.pathsep}{users}")

    return write


async def test_a_token_that_rotates_in_its_file(use: Callable[[Json], None], token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of yesterday")
    use({"tokenFile": str(file)})
    kube = Kube(ClusterLogin())
    try:
        with pytest.raises(RefusedError, match="Unauthorized"):
            await kube.get("/api/v1/pods")
        file.write_text(token)
        found = await asyncio.gather(*(kube.get("/api/v1/pods") for _ in range(3)))
        assert {item["kind"] for item in found} == {"PodList"}
        with pytest.raises(RefusedError, match="cannot list"):
            await kube.list(SECRETS, "a=b")
    finally:
        await kube.close()


async def test_an_exec_plugin(use: Callable[[Json], None], token: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "token").write_text(token)
    words = [str(tmp_path / "plugin.py"), str(tmp_path / "token")]
    use({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": words}})
    kube = Kube(ClusterLogin())
    try:
        assert (await kube.get("/api/v1/pods"))["kind"] == "PodList"
    finally:
        await kube.close()


async def test_a_client_certificate(bare_cluster: Cluster, use: Callable[[Json], None]) -> None:
    config = yaml.safe_load(bare_cluster.plane.kubeconfig.read_text())
    use(config["users"][0]["user"])
    kube = Kube(ClusterLogin())
    try:
        assert json.dumps(await kube.list(SECRETS, "no=such")) == "[]"
    finally:
        await kube.close()
