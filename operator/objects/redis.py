"""The bus of a service: an instance that the operator runs, or another one by its URL. Pure.

The managed one keeps nothing on disk: it is a bus, and losing it costs time and never a token.
"""

from __future__ import annotations

from typing import Any

from pdserve.operator.api.spec import ServiceSpec
from pdserve.operator.names import REDIS, REDIS_PORT, child, labels, selector
from pdserve.operator.objects.pods import secret_env, security

Json = dict[str, Any]

PASSWORD_KEY = "password"  # noqa: S105  the name of a key
_PASSWORD = "REDIS_PASSWORD"  # noqa: S105  the name of a variable
_OPTIONS = [
    *("--port", str(REDIS_PORT)),
    *("--bind", "* -::*"),
    *("--save", ""),
    *("--appendonly", "no"),
    *("--maxmemory-policy", "noeviction"),
    *("--dir", "/tmp"),  # noqa: S108
    *("--requirepass", f"$({_PASSWORD})"),
]


def redis_env(spec: ServiceSpec) -> list[Json]:
    """Variables by which every process finds the bus; a password comes out of its Secret and into no other object."""
    if spec.redis_url is None:
        secret = secret_env(_PASSWORD, child(spec.name, REDIS), PASSWORD_KEY)
        return [secret, _url(f"redis://:$({_PASSWORD})@{child(spec.name, REDIS)}:{REDIS_PORT}/0")]
    if spec.redis_auth is None:
        return [_url(spec.redis_url)]
    scheme, _, rest = spec.redis_url.partition("://")
    secret = secret_env(_PASSWORD, spec.redis_auth.name, spec.redis_auth.key)
    return [secret, _url(f"{scheme}://:$({_PASSWORD})@{rest}")]


def redis_deployment(spec: ServiceSpec, image: str) -> Json:
    """One pod; replaced only after the old one has gone, since two would split the bus."""
    container: Json = {
        "name": REDIS,
        "image": image,
        "command": ["valkey-server", *_OPTIONS],
        "env": [secret_env(_PASSWORD, child(spec.name, REDIS), PASSWORD_KEY)],
        "ports": [{"name": REDIS, "containerPort": REDIS_PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": REDIS}, "periodSeconds": 2},
        "livenessProbe": {"tcpSocket": {"port": REDIS}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod: Json = {
        "serviceAccountName": spec.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security(),
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    wanted = selector(spec.name, REDIS)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": child(spec.name, REDIS), "labels": labels(spec.name, REDIS)},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": wanted},
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 1,
            "template": {"metadata": {"labels": wanted}, "spec": pod},
        },
    }


def _url(value: str) -> Json:
    return {"name": "PDS_REDIS_URL", "value": value}
