"""A PDService's spec as frozen dataclasses: read once from the object, defaults applied, checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.errors import PdserveError
from pdserve.operator.api.defaults import problems, with_defaults
from pdserve.operator.api.durations import seconds
from pdserve.operator.api.rules import broken_rules
from pdserve.operator.api.service_schema import service_spec
from pdserve.operator.api.support import SERVICE_FIELDS_NOT_READ, set_fields
from pdserve.operator.names import DECODE, PREFILL

_SCHEMA = service_spec()
_MAX_SENTENCES = 5

Json = dict[str, Any]


class SpecError(PdserveError):
    """A spec cannot be served as it is; the message says what to change."""


@dataclass(frozen=True)
class SecretKey:
    """One key of a Secret."""

    name: str
    key: str


@dataclass(frozen=True)
class ModelSpec:
    """Fields of `spec.model`, as read."""

    source: str
    revision: str | None
    served_name: str | None
    dtype: str
    quantization: str
    max_model_len: int | None
    cache_pvc: str | None
    cache_size: str | None
    auth: SecretKey | None

    @property
    def claim(self) -> str | None:
        """Name of the claim of a pvc:// source."""
        return self.source.removeprefix("pvc://").partition("/")[0] if self.source.startswith("pvc://") else None


@dataclass(frozen=True)
class GatewaySpec:
    """Fields of `spec.gateway`, as read."""

    replicas: int
    max_queue_requests: int
    max_queue_tokens: int
    resources: Json | None
    drain_s: int
    pod_overlay: Json


@dataclass(frozen=True)
class EngineSpec:
    """`spec.prefill.engine` or `spec.decode.engine`."""

    executor: str
    max_batched_tokens: int
    max_sequences: int
    kv_memory_fraction: float | None
    kv_dtype: str
    num_blocks: int | None
    block_size: int
    has_prefix_cache: bool
    threads: int | None


@dataclass(frozen=True)
class PoolSpec:
    """`spec.prefill` or `spec.decode`."""

    role: str
    min: int
    replicas: int | None
    engine: EngineSpec
    resources: Json | None
    accelerator: str | None
    """Extended resource; one of it for each worker."""
    rdma: str | None
    node_selector: dict[str, str]
    tolerations: list[Json]
    pod_overlay: Json
    drain_s: int
    start_s: int


@dataclass(frozen=True)
class ServiceSpec:
    """All fields of a PDService's `spec`."""

    name: str
    model: ModelSpec
    image: str | None
    pull_secrets: tuple[str, ...]
    ttft_s: float
    tpot_s: float
    percentile: int
    gateway: GatewaySpec
    pools: dict[str, PoolSpec]
    budget_accelerators: int | None
    budget_pods: int | None
    disaggregation: str
    min_remote_tokens: int | None
    max_attempts: int
    deadline_s: float
    local_prefill: str
    transport: str
    lease_s: float
    first_port: int
    last_port: int
    scaling: str
    policy: str | None
    max_skew: int
    allows_downtime: bool
    redis_url: str | None
    redis_auth: SecretKey | None
    wants_pod_monitor: bool
    wants_dashboards: bool
    not_supported: tuple[str, ...]
    """Paths of fields that are set and not read."""


def read_service(service: Json) -> ServiceSpec:
    """Read a whole PDService object.

    Raises:
        SpecError: the spec breaks the schema or a rule; with a sentence for each, at most five.
    """
    name = service["metadata"]["name"]
    spec = with_defaults(_SCHEMA, service.get("spec") or {})
    wrong = list(problems(_SCHEMA, spec)) or broken_rules(name, spec)
    if wrong:
        more = f" (and {len(wrong) - _MAX_SENTENCES} more)" if len(wrong) > _MAX_SENTENCES else ""
        raise SpecError("; ".join(wrong[:_MAX_SENTENCES]) + more)
    return _service(name, spec)


def _service(name: str, spec: Json) -> ServiceSpec:
    budget = spec.get("budget", {})
    transfer, failure, redis, seen = spec["transfer"], spec["failure"], spec["redis"], spec["observability"]
    first_port, last_port = map(int, transfer["portRange"].split("-"))
    return ServiceSpec(
        name=name,
        model=_model(spec["model"]),
        image=spec.get("image"),
        pull_secrets=tuple(secret["name"] for secret in spec.get("imagePullSecrets", [])),
        ttft_s=seconds(spec["slo"]["ttft"]),
        tpot_s=seconds(spec["slo"]["tpot"]),
        percentile=spec["slo"]["percentile"],
        gateway=_gateway(spec["gateway"]),
        pools={role: _pool(role, spec[role]) for role in (PREFILL, DECODE)},
        budget_accelerators=budget.get("accelerators"),
        budget_pods=budget.get("pods"),
        disaggregation=spec["disaggregation"]["mode"],
        min_remote_tokens=spec["disaggregation"].get("minRemoteTokens"),
        max_attempts=failure["maxAttempts"],
        deadline_s=seconds(failure["deadline"]),
        local_prefill=failure["localPrefill"],
        transport=transfer["transport"],
        lease_s=seconds(transfer["lease"]),
        first_port=first_port,
        last_port=last_port,
        scaling=spec["scaling"]["mode"],
        policy=spec["scaling"].get("policyRef"),
        max_skew=spec["rollout"]["maxSkew"],
        allows_downtime=spec["rollout"]["allowDowntime"],
        redis_url=redis.get("urls", [None])[0],
        redis_auth=_secret(redis.get("authSecretRef")),
        wants_pod_monitor=seen["podMonitor"],
        wants_dashboards=seen["dashboards"],
        not_supported=tuple(path for path in _not_read(spec) if not _is_own_min(spec, path)),
    )


def _not_read(spec: Json) -> tuple[str, ...]:
    return set_fields(_SCHEMA, spec, SERVICE_FIELDS_NOT_READ)


def _is_own_min(spec: Json, path: str) -> bool:
    """Whether it is a `max` equal to the pool's `min`, which is what it is when left out."""
    role, _, field = path.partition(".")
    return field == "max" and role in (PREFILL, DECODE) and bool(spec[role]["max"] == spec[role]["min"])


def _secret(reference: Json | None) -> SecretKey | None:
    return SecretKey(reference["name"], reference["key"]) if reference else None


def _model(model: Json) -> ModelSpec:
    return ModelSpec(
        source=model["source"],
        revision=model.get("revision"),
        served_name=model.get("servedName"),
        dtype=model["dtype"],
        quantization=model["quantization"],
        max_model_len=model.get("maxModelLen"),
        cache_pvc=model["cache"].get("pvc"),
        cache_size=model["cache"].get("size"),
        auth=_secret(model.get("authSecretRef")),
    )


def _gateway(gateway: Json) -> GatewaySpec:
    return GatewaySpec(
        replicas=gateway["replicas"],
        max_queue_requests=gateway["queue"]["maxRequests"],
        max_queue_tokens=gateway["queue"]["maxTokens"],
        resources=gateway.get("resources"),
        drain_s=gateway["drainSeconds"],
        pod_overlay=gateway.get("podTemplate", {}),
    )


def _pool(role: str, pool: Json) -> PoolSpec:
    return PoolSpec(
        role=role,
        min=pool["min"],
        replicas=pool.get("replicas"),
        engine=_engine(pool["engine"]),
        resources=pool.get("resources"),
        accelerator=pool["accelerator"]["resource"] if "accelerator" in pool else None,
        rdma=pool["rdma"]["resource"] if "rdma" in pool else None,
        node_selector=pool.get("nodeSelector", {}),
        tolerations=pool.get("tolerations", []),
        pod_overlay=pool.get("podTemplate", {}),
        drain_s=pool["drainSeconds"],
        start_s=pool["startSeconds"],
    )


def _engine(engine: Json) -> EngineSpec:
    return EngineSpec(
        executor=engine["executor"],
        max_batched_tokens=engine["maxBatchedTokens"],
        max_sequences=engine["maxSequences"],
        kv_memory_fraction=engine.get("kvMemoryFraction"),
        kv_dtype=engine["kvDtype"],
        num_blocks=engine.get("numBlocks"),
        block_size=engine["blockSize"],
        has_prefix_cache=engine["prefixCache"],
        threads=engine.get("threads"),
    )
