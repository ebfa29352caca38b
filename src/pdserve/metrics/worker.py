"""A worker's metrics: queue, KV blocks, steps and jobs; the same for both roles, which scrape targets tell apart."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.metrics import buckets, labels
from pdserve.metrics.labels import initialise
from pdserve.metrics.transfer import TransferMetrics


class WorkerMetrics:
    """All collectors of one worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.transfer = TransferMetrics(registry)
        self._states(registry)
        self._kv(registry)
        self._steps(registry)
        self._jobs(registry)

    def _states(self, registry: CollectorRegistry) -> None:
        self.num_requests_running = Gauge(
            "pd_num_requests_running", "Sequences in the batch of this worker.", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "pd_num_requests_waiting",
            "Sequences waiting in this worker, for blocks or for a hand-off.",
            registry=registry,
        )
        self.waiting_tokens = Gauge(
            "pd_waiting_tokens", "Prompt tokens that are not computed yet, of all sequences held.", registry=registry
        )
        self.draining = Gauge("pd_draining", "1 while this worker takes nothing new.", registry=registry)
        self.model_load = Gauge("pd_model_load_seconds", "Duration of loading and warm-up.", registry=registry)

    def _kv(self, registry: CollectorRegistry) -> None:
        self.kv_cache_usage_ratio = Gauge(
            "pd_kv_cache_usage_ratio",
            "Share of the KV blocks that are neither free nor merely cached.",
            registry=registry,
        )
        self.kv_blocks = Gauge("pd_kv_blocks", "KV blocks by their state in the ledger.", ["state"], registry=registry)
        initialise(self.kv_blocks, labels.BLOCK_STATES)
        self.kv_leases_expired = Counter(
            "pd_kv_leases_expired_total", "KV leases that no decode worker renewed.", registry=registry
        )
        self.prefix_cache_tokens = Counter(
            "pd_prefix_cache_tokens_total",
            "Prompt tokens found in the prefix cache, and not found.",
            ["result"],
            registry=registry,
        )
        initialise(self.prefix_cache_tokens, labels.CACHE_RESULTS)
        self._cache_config_info = Gauge(
            "pd_cache_config_info",
            "Size of the KV cache, told by the labels; the value is 1.",
            ["block_size", "num_blocks"],
            registry=registry,
        )

    def _steps(self, registry: CollectorRegistry) -> None:
        self.step = Histogram(
            "pd_step_seconds", "Duration of one step of the engine.", buckets=buckets.STAGE_S, registry=registry
        )
        self.step_tokens = Histogram(
            "pd_step_tokens", "Tokens computed in one step.", buckets=buckets.COUNTS, registry=registry
        )
        self.batch_size = Histogram(
            "pd_batch_size", "Sequences computed in one step.", buckets=buckets.COUNTS, registry=registry
        )
        self.preemptions = Counter(
            "pd_preemptions_total", "Sequences that lost their blocks to others and start anew.", registry=registry
        )
        self.recomputed_tokens = Counter(
            "pd_recomputed_tokens_total",
            "Tokens computed again after a preemption or a lost hand-off.",
            registry=registry,
        )

    def _jobs(self, registry: CollectorRegistry) -> None:
        self.jobs = Counter(
            "pd_worker_jobs_total", "Jobs of this worker by what became of them.", ["result"], registry=registry
        )
        initialise(self.jobs, labels.JOB_RESULTS)
        self.handoff_rejected = Counter(
            "pd_handoff_rejected_total", "Hand-offs refused to a decode worker.", ["reason"], registry=registry
        )
        initialise(self.handoff_rejected, labels.HANDOFF_REJECTIONS)
        self.late_messages_dropped = Counter(
            "pd_late_messages_dropped_total",
            "Messages about attempts that this worker does not hold (any more).",
            ["reason"],
            registry=registry,
        )
        initialise(self.late_messages_dropped, labels.LATE_REASONS)

    def set_cache_config(self, *, block_size: int, num_blocks: int) -> None:
        """Tell the size of the KV cache, once."""
        self._cache_config_info.clear()
        self._cache_config_info.labels(str(block_size), str(num_blocks)).set(1)

    def set_kv_blocks(self, num_by_state: Mapping[str, int]) -> None:
        """Set block gauges and the usage ratio from the KV ledger; states left out are 0."""
        num_used = 0
        for state in labels.BLOCK_STATES:
            num_blocks = num_by_state.get(state, 0)
            self.kv_blocks.labels(state).set(num_blocks)
            num_used += num_blocks if state not in ("free", "cached") else 0
        total = sum(num_by_state.values())
        self.kv_cache_usage_ratio.set(num_used / total if total else 0.0)
