"""Metrics of KV transfers, seen from the side that READs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.metrics import buckets, labels
from pdserve.metrics.labels import initialise


class TransferMetrics:
    """All collectors of one worker's transfers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "pd_kv_transfer_seconds",
            "From the first READ of a hand-off posted to its last one verified.",
            ["backend"],
            buckets=buckets.STAGE_S,
            registry=registry,
        )
        self.bytes = Histogram(
            "pd_kv_transfer_bytes",
            "Size of the KV blocks of a hand-off.",
            ["backend"],
            buckets=buckets.BYTES,
            registry=registry,
        )
        self.results = Counter(
            "pd_kv_transfers_total",
            "READs of announced blocks, by transport and by how they ended.",
            ["backend", "result"],
            registry=registry,
        )
        self.inflight = Gauge(
            "pd_kv_transfers_inflight", "KV transfers that have begun and not ended.", registry=registry
        )
        self.digest_mismatches = Counter(
            "pd_kv_digest_mismatch_total",
            "Blocks whose content was not what the prefill worker announced.",
            registry=registry,
        )
        initialise(self.seconds, labels.BACKENDS)
        initialise(self.bytes, labels.BACKENDS)
        initialise(self.results, labels.BACKENDS, labels.TRANSFER_RESULTS)
