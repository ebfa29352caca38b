"""One cluster for the whole session: control plane, a node that runs pods as processes, the operator as installed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster.binaries import find_control_plane
from cluster.control_plane import ControlPlane
from cluster.harness import ROOT, Cluster, Namespace, wait_for
from cluster.network import private_network

_TEST_FOLDER = Path(__file__).parent
OPERATOR_NAMESPACE = "pdserve-system"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a control plane, and minutes rather than seconds."""
    for item in items:
        if item.path.is_relative_to(_TEST_FOLDER):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(400))


_headlines: list[str] = []
_outcomes: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what tests have measured: `record_property("headline", …)`."""
    if "tests/cluster/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.outcome] += 1
        _headlines.extend(str(value) for name, value in report.user_properties if name == "headline")


def pytest_unconfigure() -> None:
    """The last line of `make test-cluster`."""
    if any(_outcomes.values()):
        counts = ", ".join(f"{number} {outcome}" for outcome, number in _outcomes.items())
        print("; ".join([f"\ncluster: {counts}", *_headlines]))


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of converted models: tiny ones and the demo, made once per machine."""
    home = Path(os.environ.get("PDS_HOME") or Path.home() / ".cache" / "pdserve")
    code = (
        "import sys, pathlib; from pdserve.models.resolve import resolve_model\n"
        "for name in ('tiny', 'demo'): resolve_model(name, pathlib.Path(sys.argv[1]), print)"
    )
    subprocess.run([sys.executable, "-c", code, str(home)], check=True, timeout=300)
    return home / "models"


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model: the same shape, other weights."""
    folder = tmp_path_factory.mktemp("other") / "tiny-b"
    code = (
        "import sys, pathlib; from pdserve.models.tiny import make_model\n"
        "make_model(pathlib.Path(sys.argv[1]), 'llama', 7)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Control plane with the CustomResourceDefinitions; nothing runs pods."""
    binaries = find_control_plane()
    if isinstance(binaries, str):
        pytest.skip(f"NO CLUSTER TESTS: {binaries}")
    folder = tmp_path_factory.mktemp("cluster")
    with private_network(), ControlPlane(binaries, folder / "control-plane") as plane:
        cluster = Cluster(plane, folder / "node")
        # kubectl's own check of this old server's schema knows no CEL rules; the server drops them.
        cluster.kubectl("apply", "--validate=false", "-k", "manifests/crds")
        yield cluster
        cluster.client.close()


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster, models: Path) -> Iterator[Cluster]:
    """With a node, and the operator as its manifests install it."""
    folder = bare_cluster.node_folder
    folder.mkdir(parents=True)
    agent = [sys.executable, str(_TEST_FOLDER / "process_node.py"), str(bare_cluster.plane.kubeconfig), str(folder)]
    with (folder / "node.log").open("wb") as log:
        node = subprocess.Popen([*agent, "--models", str(models)], stdout=log, stderr=log, cwd=ROOT)
    try:
        bare_cluster.kubectl("apply", "--validate=false", "-k", "manifests/overlays/all-namespaces")
        wait_for(lambda: _operator_is_ready(bare_cluster), 60, "the operator is ready", lambda: _logs(folder))
        yield bare_cluster
    finally:
        node.terminate()
        node.wait(30)


def _operator_is_ready(cluster: Cluster) -> bool:
    path = f"/apis/apps/v1/namespaces/{OPERATOR_NAMESPACE}/deployments/pdserve-operator"
    return bool(cluster.get(path).get("status", {}).get("readyReplicas"))


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.rglob("*.log"))


@pytest.fixture(scope="session")
def new_namespace(cluster: Cluster) -> Callable[[str], Namespace]:
    """Makes namespaces."""
    numbers = itertools.count(1)
    # Several sessions may run on one machine; processes are told apart by their namespace.
    return lambda name: cluster.namespace(f"{name}-{os.getpid()}-{next(numbers)}")


@pytest.fixture
def namespace(request: pytest.FixtureRequest, new_namespace: Callable[[str], Namespace]) -> Iterator[Namespace]:
    """A namespace of this test's own; its services are deleted at the end, so that later tests have the cores."""
    made = new_namespace("test")
    yield made
    made.kubectl("delete", "pds", "--all", "--wait=false")
    wait_for(lambda: not made.pods(), 100, "its pods have gone")
