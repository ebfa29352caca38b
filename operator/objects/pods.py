"""Pod templates of gateway and workers. Pure: spec → the template that a Deployment carries.

A template's digest is its label: pods of an older template are told apart by it.
"""

from __future__ import annotations

from typing import Any

from pdserve.operator.api.spec import PoolSpec, ServiceSpec
from pdserve.operator.digest import digest_of
from pdserve.operator.names import (
    API_PORT,
    GATEWAY,
    METRICS_PORT,
    SIGNATURE_LABEL,
    TEMPLATE_LABEL,
    selector,
)
from pdserve.operator.objects.overlay import apply_overlay
from pdserve.operator.objects.process_settings import CLAIM_FOLDER, HOME, transport

Json = dict[str, Any]

ENDPOINT_DELAY_S = 5
"""Between a gateway's removal from its Service and its SIGTERM, so that proxies have heard of it."""
WORKER_STOP_DELAY_S = 1
"""Between a worker's removal and its SIGTERM. No proxy routes to workers; their drain itself tells the gateways."""
_EXIT_S = 15
"""After the drain: last messages, teardown of transports."""
_PROBE_PERIOD_S = 2
_GATEWAY_START_S = 600
_USER_ID = 10001
_ZONE = "topology.kubernetes.io/zone"


def gateway_template(spec: ServiceSpec, image: str, settings_name: str, redis_env: list[Json]) -> Json:
    """The gateway's pods: they spread over nodes."""
    gateway = spec.gateway
    mounts, volumes = _volumes(spec)
    container = _container(GATEWAY, image, settings_name, mounts, _GATEWAY_START_S, ENDPOINT_DELAY_S) | {
        "ports": [_port("http", API_PORT), _port("metrics", METRICS_PORT)],
        "env": [*redis_env, _field("PDS_ADVERTISE_HOST", "status.podIP"), *_fixed_env(spec)],
        "resources": gateway.resources or {"requests": {"cpu": "500m", "memory": "512Mi"}},
    }
    grace_s = ENDPOINT_DELAY_S + gateway.drain_s + _EXIT_S
    pod = _pod(spec, container, volumes, grace_s) | {"affinity": {"podAntiAffinity": _near(spec, GATEWAY, _HOST)}}
    return _template(spec, GATEWAY, pod, {}, gateway.pod_overlay)


def worker_template(
    spec: ServiceSpec, pool: PoolSpec, image: str, settings_name: str, redis_env: list[Json], signature: str
) -> Json:
    """A pool's pods: all of a service in one zone where possible, since KV crosses between them."""
    mounts, volumes = _volumes(spec)
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    container = _container(pool.role, image, settings_name, mounts, pool.start_s, WORKER_STOP_DELAY_S) | {
        "ports": [_port("metrics", METRICS_PORT), _port("transfer", spec.first_port)],
        "env": [*redis_env, *_worker_env(spec), *_fixed_env(spec)],
        "resources": _resources(pool),
    }
    if pool.rdma:
        container["securityContext"] = _container_security(capabilities=["IPC_LOCK"])
    grace_s = WORKER_STOP_DELAY_S + pool.drain_s + _EXIT_S
    pod = _pod(spec, container, volumes, grace_s) | {"affinity": {"podAffinity": _near(spec, None, _ZONE)}}
    if pool.node_selector:
        pod["nodeSelector"] = pool.node_selector
    if pool.tolerations:
        pod["tolerations"] = pool.tolerations
    return _template(spec, pool.role, pod, {SIGNATURE_LABEL: signature}, pool.pod_overlay)


def security(**more: Any) -> Json:
    """The security context of a pod: no root, the default seccomp profile."""
    base: Json = {"runAsNonRoot": True, "runAsUser": _USER_ID, "runAsGroup": _USER_ID, "fsGroup": _USER_ID}
    return base | {"seccompProfile": {"type": "RuntimeDefault"}} | more


def _template(spec: ServiceSpec, role: str, pod: Json, more_labels: dict[str, str], overlay: Json) -> Json:
    labels = selector(spec.name, role) | more_labels
    template = apply_overlay({"metadata": {"labels": labels}, "spec": pod}, overlay)
    # The selector is immutable: whatever an overlay says, these labels stay.
    template["metadata"]["labels"] |= labels
    template["metadata"]["labels"][TEMPLATE_LABEL] = digest_of(template)
    return template


def _pod(spec: ServiceSpec, container: Json, volumes: list[Json], grace_s: int) -> Json:
    pod: Json = {
        "serviceAccountName": spec.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # they would set PDS_…_PORT for a Service named pds-…: unknown settings
        "securityContext": security(),
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": volumes,
    }
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    return pod


def _container(role: str, image: str, settings_name: str, mounts: list[Json], start_s: int, stop_s: int) -> Json:
    return {
        "name": role,
        "image": image,
        "command": ["pdserve", role],
        "envFrom": [{"configMapRef": {"name": settings_name}}],
        "volumeMounts": mounts,
        "securityContext": _container_security(),
        "startupProbe": _probe("/health", failureThreshold=max(1, start_s // _PROBE_PERIOD_S)),
        "readinessProbe": _probe("/ready", failureThreshold=2),
        "livenessProbe": _probe("/health", periodSeconds=10, failureThreshold=3),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # its last words are in the status, then in ours
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(stop_s)]}}},
    }


def _probe(path: str, **more: int) -> Json:
    base: Json = {"httpGet": {"path": path, "port": "metrics"}, "periodSeconds": _PROBE_PERIOD_S, "timeoutSeconds": 5}
    return base | more


def _container_security(capabilities: list[str] | None = None) -> Json:
    added = {"add": capabilities} if capabilities else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]} | added,
    }


def _volumes(spec: ServiceSpec) -> tuple[list[Json], list[Json]]:
    """(mounts, volumes) that gateway and workers share: scratch, cache, and the claim of a pvc:// model."""
    model = spec.model
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "cache", "mountPath": HOME}]  # noqa: S108
    limit = {"sizeLimit": model.cache_size} if model.cache_size else {}
    cache: Json = (
        {"persistentVolumeClaim": {"claimName": model.cache_pvc}} if model.cache_pvc else {"emptyDir": dict(limit)}
    )
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}, {"name": "cache"} | cache]
    if model.claim:
        mounts.append({"name": "model", "mountPath": CLAIM_FOLDER, "readOnly": True})
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": model.claim, "readOnly": True}})
    return mounts, volumes


def _worker_env(spec: ServiceSpec) -> list[Json]:
    env = [
        _field("PDS_ADVERTISE_HOST", "status.podIP"),
        _field("PDS_WORKER_ID", "metadata.name"),
        _field("PDS_NODE", "spec.nodeName"),
        _field("PDS_ZONE", f"metadata.labels['{_ZONE}']"),
    ]
    if transport(spec) != "tcp":
        env.append({"name": "UCX_TCP_PORT_RANGE", "value": f"{spec.first_port + 1}-{spec.last_port}"})
    return env


def _fixed_env(spec: ServiceSpec) -> list[Json]:
    env: list[Json] = [
        {"name": "PDS_HOME", "value": HOME},
        {"name": "HF_HOME", "value": f"{HOME}/hub"},
        {"name": "HOME", "value": "/tmp"},  # noqa: S108
    ]
    if spec.model.auth:
        env.append(secret_env("HF_TOKEN", spec.model.auth.name, spec.model.auth.key))
    return env


def secret_env(variable: str, secret: str, key: str) -> Json:
    """An environment variable out of a Secret."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _field(variable: str, path: str) -> Json:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _port(name: str, number: int) -> Json:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _resources(pool: PoolSpec) -> Json:
    resources: Json = dict(pool.resources or {"requests": {"cpu": "1", "memory": "2Gi"}})
    devices = {device: "1" for device in (pool.accelerator, pool.rdma) if device}
    if devices:
        resources["limits"] = resources.get("limits", {}) | devices
    return resources


_HOST = "kubernetes.io/hostname"


def _near(spec: ServiceSpec, role: str | None, topology: str) -> Json:
    wanted = selector(spec.name, role or "")
    if role is None:
        wanted = {name: value for name, value in wanted.items() if value}
    term = {"labelSelector": {"matchLabels": wanted}, "topologyKey": topology}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
