"""Counts what the dispatcher and the HTTP layer tell, in this gateway's metrics. Only this file knows both."""

from __future__ import annotations

from pdserve.gateway.observers import RequestRecord
from pdserve.metrics import labels
from pdserve.metrics.gateway import GatewayMetrics

_SHED_REASONS = {"no_workers": "no_pair", "bus": "no_pair", "deadline": "predicted_wait", "stream_full": "queue_tokens"}
"""Reasons of the door → labels of the metric, where they differ."""


class GatewayCounting:
    """Both observers of one gateway."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    # --- dispatcher

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        """Not among the metrics of this process."""

    def shed(self, reason: str) -> None:
        """A request was refused."""
        label = labels.within(_SHED_REASONS.get(reason, reason), labels.SHED_REASONS, "queue_requests")
        self._metrics.shed.labels(label).inc()

    def cancelled(self, reason: str) -> None:
        """A request was cancelled."""
        self._metrics.cancelled.labels(labels.within(reason, labels.CANCEL_REASONS, "client")).inc()

    def redispatched(self, phase: str, reason: str) -> None:
        """A sequence goes back to the queue."""
        self._metrics.count_redispatch(phase, reason)

    def dropped_tokens(self, num_tokens: int) -> None:
        """Tokens came again."""
        self._metrics.duplicate_tokens_dropped.inc(num_tokens)

    def diverged(self) -> None:
        """Counted as the re-dispatch that follows."""

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        """Current sizes."""
        del queued_tokens, held
        self._metrics.queue_requests.set(queued_requests)
        self._metrics.inflight_requests.set(inflight)

    # --- HTTP layer

    def tokenized(self, duration_s: float) -> None:
        """Part of the frontend stage."""

    def offered(self, num_prompt_tokens: int) -> None:
        """Counted when the request ends."""

    def tokens_came(self, gap_s: float | None, num_tokens: int) -> None:
        """Tokens that came together have no gap between them."""
        self._metrics.generation_tokens.inc(num_tokens)
        if gap_s is not None:
            self._metrics.inter_token_latency.observe(gap_s)
        for _ in range(num_tokens - 1):
            self._metrics.inter_token_latency.observe(0.0)

    def ended(self, record: RequestRecord) -> None:
        """One request, at its end."""
        metrics, waterfall = self._metrics, record.waterfall
        metrics.count_request(record.code, record.finish_reason)
        metrics.request_duration.observe(record.duration_s)
        if record.token_waits_s:
            metrics.time_per_output_token.observe(sum(record.token_waits_s) / len(record.token_waits_s))
        if waterfall is None or waterfall.first_token_s is None:
            return
        metrics.time_to_first_token.observe(waterfall.ttft_s)
        for stage in labels.TTFT_STAGES:
            metrics.ttft_stage.labels(stage).observe(getattr(waterfall, f"{stage}_s"))
        if waterfall.second_token_s is not None:
            metrics.handoff_gap.observe(waterfall.handoff_gap_s)
