"""`pdserve render FILE`: the Kubernetes objects that the operator makes of a PDService."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from pdserve.arguments import CommandParser
from pdserve.operator.api.crds import to_yaml
from pdserve.operator.api.spec import SpecError, read_service
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import API_VERSION, REDIS, child, labels
from pdserve.operator.objects.plan import plan_of, with_owner

Json = dict[str, Any]


def main(argv: list[str]) -> int:
    """Print YAML of every PDService in a file (`-` is standard input). Needs no cluster."""
    parser = CommandParser(
        prog="pdserve render",
        description="Prints what the operator makes of a PDService.",
    )
    parser.add_argument("file", help="YAML with one or more PDService objects; - reads standard input")
    parser.add_argument("--namespace", default="default", help="namespace of objects that name none")
    parser.add_argument(
        "--image",
        default=os.environ.get("PDS_IMAGE") or ClusterFacts.default_image,
        help="image of services that name none",
    )
    parser.add_argument(
        "--monitoring", action="store_true", help="add what a cluster that runs the Prometheus operator gets"
    )
    options = parser.parse_args(argv)
    facts = ClusterFacts(
        default_image=options.image,
        has_pod_monitors=options.monitoring,
        has_prometheus_rules=options.monitoring,
    )
    services = [document for document in _documents(options.file) if document.get("kind") == "PDService"]
    if not services:
        raise SpecError(f"{options.file} holds no object of kind PDService ({API_VERSION})")
    made = [item for service in services for item in rendered(service, options.namespace, facts)]
    print("---\n".join(to_yaml(item) for item in made), end="")
    return 0


def rendered(service: Json, namespace: str, facts: ClusterFacts) -> list[Json]:
    """Every object of one service, in the order it is applied. The owner's uid is known to the cluster alone."""
    metadata = service["metadata"]
    owner = Owner(metadata["name"], metadata.get("namespace") or namespace, metadata.get("uid") or "UID")
    spec = read_service(service)
    plan = plan_of(spec, owner, facts)
    pools = [made | {"spec": made["spec"] | {"replicas": spec.pools[role].min}} for role, made in plan.pools.items()]
    secret = [_password_secret(spec.name)] if plan.has_managed_redis else []
    unfinished = [with_owner(made, owner) for made in (*secret, plan.gateway, *pools)]
    return [*plan.others, *unfinished]


def _password_secret(service: str) -> Json:
    """The operator draws the password once; it is never shown."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": child(service, REDIS), "labels": labels(service, REDIS)},
        "stringData": {"password": "DRAWN-BY-THE-OPERATOR"},
    }


def _documents(file: str) -> list[Json]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is no valid YAML: {error}") from error
