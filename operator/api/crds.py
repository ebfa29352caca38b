"""The two CustomResourceDefinitions; `python -m pdserve.operator.api.crds FOLDER` writes the files to install."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from pdserve.operator.api.policy_schema import policy_spec
from pdserve.operator.api.schema_types import Schema
from pdserve.operator.api.service_schema import OBJECT_RULES, service_spec
from pdserve.operator.api.status_schema import service_status
from pdserve.operator.names import GROUP, VERSION

_SERVICE_COLUMNS = [
    ("MODEL", ".spec.model.source", 0),
    ("PREFILL", ".status.pools.prefill.display", 0),
    ("DECODE", ".status.pools.decode.display", 0),
    ("TTFT", ".status.observed.ttft.p95", 0),
    ("TPOT", ".status.observed.tpot.p95", 0),
    ("SLO", '.status.conditions[?(@.type=="SLOMet")].status', 0),
    ("READY", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("AGE", ".metadata.creationTimestamp", 0),
    ("SIGNATURE", ".status.kvSignature", 1),
    ("LAST DECISION", ".status.decisions[0].rule", 1),
]
_POLICY_COLUMNS = [
    ("INTERVAL", ".spec.interval", 0),
    ("WINDOW", ".spec.window", 0),
    ("AGE", ".metadata.creationTimestamp", 0),
]


def all_crds() -> list[dict[str, Any]]:
    """The CustomResourceDefinitions of PDService and ScalingPolicy."""
    return [
        _crd("PDService", "pdservices", "pds", service_spec(), service_status(), _SERVICE_COLUMNS, ["spec"]),
        _crd("ScalingPolicy", "scalingpolicies", "pdsp", policy_spec(), None, _POLICY_COLUMNS, []),
    ]


def _crd(
    kind: str,
    plural: str,
    short: str,
    spec: Schema,
    status: Schema | None,
    columns: list[tuple[str, str, int]],
    required: list[str],
) -> dict[str, Any]:
    schema: Schema = {
        "type": "object",
        "description": _ABOUT[kind],
        "properties": {"spec": spec} | ({"status": status} if status else {}),
    }
    if required:
        schema["required"] = required
        schema["x-kubernetes-validations"] = [dict(rule) for rule in OBJECT_RULES]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}} if status else {},
        "additionalPrinterColumns": [_column(*column) for column in columns],
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), "shortNames": [short]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names | {"categories": ["pdserve"]},
            "versions": [version],
        },
    }


_ABOUT = {
    "PDService": "A language model served with prefill and decode in separate pools.",
    "ScalingPolicy": "How eagerly the pools of services that refer to it grow and shrink.",
}


def _column(name: str, path: str, priority: int) -> dict[str, Any]:
    kind = "date" if name == "AGE" else "string"
    column: dict[str, Any] = {"name": name.title() if name == "AGE" else name, "type": kind, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


class _PlainDumper(yaml.SafeDumper):
    """Repeats equal parts instead of anchors, which not every tool reads."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def to_yaml(document: object) -> str:
    """One document, in the order it was made."""
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)


def main() -> None:
    """Write one file per kind."""
    for crd in all_crds():
        (Path(sys.argv[1]) / f"{crd['spec']['names']['plural']}.yaml").write_text(to_yaml(crd), encoding="utf-8")


if __name__ == "__main__":
    main()
