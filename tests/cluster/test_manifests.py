"""Everything that is installed, and everything the operator makes, passes a server's dry run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.harness import ROOT, Namespace
from pdserve.commands.render import rendered
from pdserve.operator.facts import ClusterFacts

OVERLAYS = sorted(path.name for path in (ROOT / "manifests" / "overlays").iterdir())
EXAMPLES = sorted((ROOT / "manifests" / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def namespace(new_namespace: object) -> Namespace:
    """A namespace in which nothing is made."""
    assert callable(new_namespace)
    made: Namespace = new_namespace("dry")
    return made


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_passes_a_server_side_dry_run(namespace: Namespace, overlay: str) -> None:
    folder = f"manifests/overlays/{overlay}"
    said = namespace.cluster.kubectl(
        *([] if overlay == "all-namespaces" else ["-n", namespace.name]), "apply", "--dry-run=server",
        "--validate=false", "-k", folder,
    )  # fmt: skip
    assert "(server dry run)" in said


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_objects_of_an_example_pass_a_server_side_dry_run(namespace: Namespace, file: Path) -> None:
    facts = ClusterFacts(disruption_budget_api="policy/v1beta1")
    for item in yaml.safe_load_all(file.read_text()):
        if item["kind"] == "PDService":
            objects = yaml.safe_dump_all(rendered(item, namespace.name, facts))
            said = namespace.kubectl("apply", "--dry-run=server", "-f", "-", stdin=objects)
            assert said.count("(server dry run)") == objects.count("\nkind:") == len(said.splitlines())
