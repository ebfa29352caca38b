"""The closed sets of reasons that processes tell each other, and that metrics and clients see.

A reader may be older than the writer: a value that it does not know becomes OTHER and never makes an entry of the
bus unreadable. Prose for people stands beside a reason (`detail`, `message`), never in its place.
"""

from __future__ import annotations

import enum


class _Tolerant(enum.StrEnum):
    """A set that crosses processes: what a reader does not know becomes OTHER."""

    @classmethod
    def _missing_(cls, value: object) -> _Tolerant:
        return cls["OTHER"]


class FailReason(_Tolerant):
    """Why an attempt ended without finishing. The first ones are said by workers (`messages.Failed`)."""

    NO_CAPACITY = "no_capacity"
    DRAINING = "draining"
    HANDOFF_TIMEOUT = "handoff_timeout"
    HANDOFF_FAILED = "handoff_failed"
    INTEGRITY = "integrity"
    PREFILL_FAILED = "prefill_failed"
    NO_TOKEN0 = "no_token0"
    PREFILL_TIMEOUT = "prefill_timeout"
    DEADLINE = "deadline"
    TOO_LONG = "too_long"
    FINGERPRINT = "fingerprint"
    SCHEMA = "schema"
    STEP_FAILED = "step_failed"
    RESTARTING = "restarting"
    CANCELLED = "cancelled"
    WORKER_GONE = "worker_gone"
    """The gateway saw its worker disappear."""
    LOST = "lost"
    """Two rosters of its worker did not list it."""
    NO_PROGRESS = "no_progress"
    """Nothing was heard of it for PROGRESS_TIMEOUT_S."""
    DIVERGENCE = "divergence"
    """Another token came at an index that was known."""
    OTHER = "other"
    """A reason of a newer worker."""


class CancelReason(_Tolerant):
    """Why a gateway stops a sequence at its workers."""

    CLIENT = "client"
    SLOW_CLIENT = "slow_client"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    FINISHED = "finished"
    """The gateway has all it needs, for example after a stop string."""
    FAILED = "failed"
    """Another choice of the same request failed, and with it the request."""
    REPLACED = "replaced"
    """Another decode worker takes the hand-off."""
    SUPERSEDED = "superseded"
    """Another attempt of the same sequence follows."""
    ORPHAN = "orphan"
    """A worker listed an attempt that no request waits for."""
    OTHER = "other"


class FinishReason(_Tolerant):
    """How a sequence ended well, as clients read it."""

    STOP = "stop"
    LENGTH = "length"
    OTHER = "other"


class KvFailReason(_Tolerant):
    """Why a prefill worker cannot serve a hand-off (`messages.KvFailed`)."""

    UNKNOWN = "unknown"
    STALE = "stale"
    NONCE = "nonce"
    GENERATION = "generation"
    GEOMETRY = "geometry"
    SCHEMA = "schema"
    CANCELLED = "cancelled"
    PREFILL_FAILED = "prefill_failed"
    EXPIRED = "expired"
    OTHER = "other"


class TransferReason(_Tolerant):
    """Why blocks could not be READ."""

    LOOKUP = "lookup"
    """A descriptor, a backend or a port that is not to be had."""
    CONNECT = "connect"
    POST = "post"
    COPY = "copy"
    VERIFY = "verify"
    """The digest of a block differs from the announced one."""
    NOTIFY = "notify"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    GENERATION = "generation"
    GEOMETRY = "geometry"
    DISCONNECTED = "disconnected"
    NONCE = "nonce"
    OTHER = "other"


class SequenceState(_Tolerant):
    """Where a sequence is on a worker, as rosters and /debug/requests name it."""

    WAITING = "waiting"
    """In the scheduler's queue; owns no blocks (or lost them by preemption)."""
    RECEIVING = "receiving"
    """Decode side: all blocks are reserved, their KV is on its way; the scheduler does not know it."""
    RUNNING = "running"
    """Owns blocks; scheduled when the budget allows (prefill chunks and decode alike)."""
    LEASED = "leased"
    """Prefill side: computed; its blocks are kept for a decode worker."""
    FINISHED = "finished"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> SequenceState:
        return cls.WAITING if value == "preempted" else cls.OTHER  # as workers of version 0.1.0 call some that wait


class Phase(enum.StrEnum):
    """Where a sequence was when something happened to it."""

    QUEUED = "queued"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"


class Ending(enum.StrEnum):
    """How a client's request ended, as it is counted: a finish reason, or why there is none."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The answer is a call of a tool; no request ends so yet."""
    CANCELLED = "cancelled"
    ERROR = "error"

    @classmethod
    def _missing_(cls, value: object) -> Ending:
        """A finish reason of a newer worker is a good end."""
        return cls.STOP


class RefusalReason(enum.StrEnum):
    """Why a gateway does not let a request in."""

    TOO_LONG = "too_long"
    DRAINING = "draining"
    BUS = "bus"
    NO_WORKERS = "no_workers"
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_tokens"
    STREAM_FULL = "stream_full"
    DEADLINE = "deadline"
