"""What workers and gateways tell about themselves: the values behind `worker:<id>` and `gateway:<id>`.

A registration is a liveness key: it expires after three heartbeats. It is rewritten with every heartbeat,
so the load in it is at most one heartbeat old. `bus/registry.py` reads and writes it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from pdserve.ids import Fingerprint, GatewayId, GenerationId, KvSignature, WorkerId

HEARTBEAT_S = 1.0
"""Seconds between two renewals of a registration, unless the setting HEARTBEAT_S says otherwise."""


class WorkerRef(NamedTuple):
    """One worker process, for all who speak of it: a restarted worker is another one."""

    worker_id: WorkerId
    generation: GenerationId

    def __str__(self) -> str:
        return f"{self.worker_id}:{self.generation}"


class Role(enum.StrEnum):
    """The policy that a worker's engine follows."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """READY processes take requests, DRAINING ones nothing new."""

    READY = "ready"
    DRAINING = "draining"


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load at its last heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    """Uncomputed prompt tokens queued or being computed."""
    num_available_blocks: int = 0
    """Free or evictable KV blocks, less what admitted hand-offs have reserved."""
    tokens_per_s: float = 0.0
    """Prefill rate, smoothed; 0 = not measured yet."""
    step_s: float = 0.0
    """Seconds that a decode step takes, smoothed."""


class WorkerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process: who it is, where it is, and how much it can take."""

    worker_id: WorkerId
    role: Role
    generation: GenerationId
    """Another one whenever the process starts or thaws; part of its identity and of the key of its inbox."""
    state: WorkerState
    pid: int
    url: str
    """The base URL of /health, /ready, /metrics and /debug."""
    model: str
    """The name under which the model is served."""
    fingerprint: Fingerprint
    kv_signature: KvSignature
    block_size: int
    num_blocks: int
    max_model_len: int
    descriptors: list[bytes] = []
    """msgpack of `transfer.base.Descriptor`, one per usable backend, preferred first."""
    node: str = ""
    zone: str = ""
    window: int = 0
    """What *each* gateway may have outstanding here: prompt tokens (prefill worker) or KV blocks (decode worker)."""
    heartbeat_s: float = HEARTBEAT_S
    load: WorkerLoad = WorkerLoad()

    @property
    def ref(self) -> WorkerRef:
        """The process that this registration is about."""
        return WorkerRef(self.worker_id, self.generation)


class GatewayRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process. Workers cancel the sequences of a gateway that is gone."""

    gateway_id: GatewayId
    generation: GenerationId
    pid: int
    url: str
    metrics_url: str
    state: WorkerState = WorkerState.READY
