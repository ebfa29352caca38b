"""The closed sets of label values; those that processes tell each other come from `pdserve.reasons`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram

from pdserve.reasons import CancelReason, Ending, FailReason, KvFailReason, Phase

BLOCK_STATES = ("free", "cached", "owned", "leased", "receiving", "quarantined")
FINISH_REASONS = tuple(Ending)
CODES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 499, 500, 501, 503, 504)
"""HTTP statuses that are sent; 499 stands for a client that left before there was one."""
TTFT_STAGES = ("frontend", "queue", "schedule", "prefill", "publish")
CANCEL_REASONS = (CancelReason.CLIENT, CancelReason.SLOW_CLIENT, CancelReason.DEADLINE, CancelReason.SHUTDOWN)
"""The reasons that end a whole request; the others end one attempt."""
SHED_REASONS = ("queue_requests", "queue_tokens", "predicted_wait", "no_pair", "hold_timeout", "draining")
PHASES = tuple(Phase)
REDISPATCH_REASONS = tuple(reason for reason in FailReason if reason is not FailReason.OTHER)
"""A reason of a newer worker counts as `lost`."""
JOB_RESULTS = ("accepted", "rejected", "finished", "failed", "cancelled")
HANDOFF_REJECTIONS = (
    KvFailReason.UNKNOWN,
    KvFailReason.STALE,
    KvFailReason.NONCE,
    KvFailReason.GENERATION,
    KvFailReason.GEOMETRY,
    KvFailReason.SCHEMA,
)
"""The reasons to refuse a decode worker; the others end a hand-off that was accepted."""
LATE_REASONS = ("unknown", "cancelled", "finished", "stale", "nonce", "generation")
CACHE_RESULTS = ("hit", "miss")
BACKENDS = ("nixl", "tcp")
TRANSFER_RESULTS = ("ok", "failed", "timeout", "aborted", "mismatch", "rejected")
BUS_LOSSES = ("queue_full", "refused")


def initialise(metric: Counter | Gauge | Histogram, *label_values: Iterable[str]) -> None:
    """Create every combination of label values, so that each exists with 0 from the start."""
    combinations: list[tuple[str, ...]] = [()]
    for values in label_values:
        combinations = [(*combination, value) for combination in combinations for value in values]
    for combination in combinations:
        metric.labels(*combination)


def within(value: str, closed_set: tuple[str, ...], otherwise: str) -> str:
    """The value if it belongs to the set, else `otherwise`: what arrives over the network makes no new series."""
    assert otherwise in closed_set, f"{otherwise!r} is not in {closed_set}"
    return value if value in closed_set else otherwise
