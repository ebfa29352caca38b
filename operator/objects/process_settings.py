"""The settings of each process that a spec asks for: names and values as `pdserve config` lists them. Pure.

Values that differ between pods of one role (addresses, ids) and secrets are no part of it: pods.py gives those.
"""

from __future__ import annotations

from pdserve.operator.api.policy import Policy
from pdserve.operator.api.spec import PoolSpec, ServiceSpec
from pdserve.operator.names import API_PORT, DECODE, METRICS_PORT, PREFILL

HOME = "/var/cache/pdserve"
"""Cache of downloaded and converted models in every container."""
CLAIM_FOLDER = "/var/cache/models"
"""Where the claim of a pvc:// model is mounted."""

Value = str | int | float | bool | None


def gateway_settings(spec: ServiceSpec, namespace: str, policy: Policy) -> dict[str, str]:
    """Settings of the gateway; with pools that may be empty it holds requests as the policy says."""
    holds = spec.pools[PREFILL].min == 0
    return _texts(
        _shared(spec, namespace)
        | {
            "PORT": API_PORT,
            "DRAIN_S": spec.gateway.drain_s,
            "REQUEST_DEADLINE_S": spec.deadline_s,
            "MAX_ATTEMPTS": spec.max_attempts,
            "MAX_QUEUE_REQUESTS": spec.gateway.max_queue_requests,
            "MAX_QUEUE_TOKENS": spec.gateway.max_queue_tokens,
            "DISAGGREGATION": spec.disaggregation.lower(),
            "MIN_REMOTE_TOKENS": spec.min_remote_tokens,
            "LOCAL_PREFILL": spec.local_prefill.lower(),
            "KV_LEASE_S": spec.lease_s,
            "TTFT_SLO_S": spec.ttft_s,
            "TPOT_SLO_S": spec.tpot_s,
            "HOLD_REQUESTS": policy.hold_requests if holds else None,
            "HOLD_TIMEOUT_S": policy.hold_timeout_s if holds else None,
        }
    )


def worker_settings(spec: ServiceSpec, namespace: str, role: str) -> dict[str, str]:
    """Settings of one pool's workers."""
    pool = spec.pools[role]
    engine = pool.engine
    return _texts(
        _shared(spec, namespace)
        | {
            "DRAIN_S": pool.drain_s,
            "DTYPE": spec.model.dtype,
            "QUANTIZATION": spec.model.quantization,
            "EXECUTOR": engine.executor,
            "MAX_NUM_BATCHED_TOKENS": engine.max_batched_tokens,
            "MAX_NUM_SEQS": engine.max_sequences,
            "KV_MEMORY_FRACTION": engine.kv_memory_fraction,
            "KV_DTYPE": engine.kv_dtype,
            "NUM_BLOCKS": engine.num_blocks,
            "BLOCK_SIZE": engine.block_size,
            "PREFIX_CACHE": engine.has_prefix_cache,
            "THREADS": engine.threads,
            "TRANSPORT": transport(spec),
            "TRANSFER_PORT": spec.first_port,
            "KV_LEASE_S": spec.lease_s,
            "LOCAL_PREFILL": spec.local_prefill.lower() if role == DECODE else None,
        }
    )


def transport(spec: ServiceSpec) -> str:
    """CUDA IPC and shared memory do not cross pods: without RDMA on both sides KV blocks travel over tcp."""
    if spec.transport != "auto":
        return spec.transport
    return "auto" if all(_has_rdma(pool) for pool in spec.pools.values()) else "tcp"


def model_source(spec: ServiceSpec) -> str:
    """The model's source, written as the setting MODEL takes it."""
    model = spec.model
    if model.claim is not None:
        return "/".join([CLAIM_FOLDER, *model.source.removeprefix("pvc://").split("/")[1:]])
    return f"{model.source}@{model.revision}" if model.revision else model.source


def _has_rdma(pool: PoolSpec) -> bool:
    return pool.rdma is not None


def _shared(spec: ServiceSpec, namespace: str) -> dict[str, Value]:
    return {
        "MODEL": model_source(spec),
        "SERVED_MODEL_NAME": spec.model.served_name,
        "MAX_MODEL_LEN": spec.model.max_model_len,
        "SERVICE": f"{namespace}.{spec.name}",
        "HOST": "0.0.0.0",  # noqa: S104  probes, peers and port-forward come by different addresses
        "METRICS_PORT": METRICS_PORT,
        "LOG_FORMAT": "json",
    }


def _texts(values: dict[str, Value]) -> dict[str, str]:
    """Environment variables; a setting without a value is left to its own default."""
    return {f"PDS_{name}": _text(value) for name, value in values.items() if value is not None}


def _text(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
