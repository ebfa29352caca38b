"""Manifests without a cluster: the CRD files are current, and today's schemas accept everything."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validator

from pdserve.commands.render import rendered
from pdserve.operator.api.crds import all_crds, to_yaml
from pdserve.operator.facts import ClusterFacts

MANIFESTS = Path(__file__).parents[3] / "manifests"
OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
EXAMPLES = sorted((MANIFESTS / "examples").glob("*.yaml"))
KUBERNETES = ("1.28", "1.33")
_KNOWN_GROUPS = ("v1", "apps/", "policy/", "networking.k8s.io/", "rbac.authorization.k8s.io/")


@pytest.fixture(autouse=True, scope="module")
def _schemas_are_read_once() -> Iterator[None]:
    """The validator reads its whole list of definitions anew for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validator, "schema_contents", cache(validator.schema_contents))
        yield


def check(item: dict[str, Any]) -> None:
    if item["apiVersion"].startswith(_KNOWN_GROUPS):
        for version in KUBERNETES:
            kubernetes_validate.validate(item, version, strict=True)


def test_the_crd_files_are_what_the_schema_says() -> None:
    for crd in all_crds():
        file = MANIFESTS / "crds" / f"{crd['spec']['names']['plural']}.yaml"
        assert file.read_text(encoding="utf-8") == to_yaml(crd), (
            "run: python -m pdserve.operator.api.crds manifests/crds"
        )


def test_every_field_teaches() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        here = [] if schema.get("description") else [path]
        for name, child in schema.get("properties", {}).items():
            here += undescribed(child, f"{path}.{name}")
        return here + (undescribed(schema["items"], f"{path}[]") if "items" in schema else [])

    for crd in all_crds():
        (version,) = crd["spec"]["versions"]
        assert undescribed(version["schema"]["openAPIV3Schema"], crd["spec"]["names"]["kind"]) == []


def test_the_demo_is_ten_lines() -> None:
    lines = (MANIFESTS / "examples" / "demo.yaml").read_text().splitlines()
    assert len(lines) == 10


@pytest.mark.parametrize("monitoring", [False, True])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_objects_of_an_example_fit_todays_schemas(file: Path, monitoring: bool) -> None:
    facts = ClusterFacts(has_pod_monitors=monitoring, has_prometheus_rules=monitoring)
    services = [item for item in yaml.safe_load_all(file.read_text()) if item["kind"] == "PDService"]
    assert services
    for service in services:
        for item in rendered(service, "shop", facts):
            check(item)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds overlays")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_todays_schemas(overlay: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS / "overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    items = list(yaml.safe_load_all(built.stdout))
    assert {"CustomResourceDefinition", "Deployment", "ServiceAccount"} <= {item["kind"] for item in items}
    for item in items:
        check(item)


def test_the_image_starts_processes_themselves() -> None:
    text = (MANIFESTS / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["pdserve"]' in text, "exec form: no shell swallows SIGTERM"
    assert "USER 10001:10001" in text
    assert "PYTHONSAFEPATH=1" in text
