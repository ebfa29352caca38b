"""Counts what the dispatcher and the HTTP layer tell, in this gateway's metrics. Only this file knows both."""

from __future__ import annotations

from pdserve.gateway.observers import RequestRecord
from pdserve.metrics import labels
from pdserve.metrics.gateway import GatewayMetrics
from pdserve.reasons import CancelReason, FailReason, Phase, RefusalReason

_SHED_LABELS = {
    RefusalReason.NO_WORKERS: "no_pair",
    RefusalReason.BUS: "no_pair",
    RefusalReason.DEADLINE: "predicted_wait",
    RefusalReason.STREAM_FULL: "queue_tokens",
}
"""Reasons of admission → labels of the metric, where they differ."""


class GatewayCounting:
    """Both observers of one gateway."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    # --- dispatcher

    def predicted_cached_tokens(self, num_tokens: int) -> None:
        """Nothing counts this yet; a metric of expected against real prefix hits will."""

    def shed(self, reason: RefusalReason) -> None:
        """A refused request counts under the label of its reason."""
        label = labels.within(_SHED_LABELS.get(reason, reason), labels.SHED_REASONS, "queue_requests")
        self._metrics.shed.labels(label).inc()

    def cancelled(self, reason: CancelReason) -> None:
        """A cancelled request counts under its reason."""
        self._metrics.cancelled.labels(labels.within(reason, labels.CANCEL_REASONS, "client")).inc()

    def redispatched(self, phase: Phase, reason: FailReason) -> None:
        """A sequence that goes back to the queue counts by where it was and why."""
        self._metrics.count_redispatch(phase, reason)

    def dropped_tokens(self, num_tokens: int) -> None:
        """Tokens that came again count once each."""
        self._metrics.duplicate_tokens_dropped.inc(num_tokens)

    def diverged(self) -> None:
        """Nothing counts this by itself yet; the re-dispatch that follows counts."""

    def set_load(self, *, queued_requests: int, queued_tokens: int, inflight: int, held: int) -> None:
        """Queue and requests in flight are gauges; nothing shows queued tokens and held requests yet."""
        del queued_tokens, held
        self._metrics.queue_requests.set(queued_requests)
        self._metrics.inflight_requests.set(inflight)

    # --- HTTP layer

    def tokenized(self, duration_s: float) -> None:
        """Nothing counts this by itself yet; it is part of the frontend stage."""

    def offered(self, num_prompt_tokens: int) -> None:
        """Nothing counts what is asked for before admission yet; a forecast of load will."""

    def tokens_came(self, gap_s: float | None, num_tokens: int) -> None:
        """Tokens that came together have no gap between them."""
        self._metrics.generation_tokens.inc(num_tokens)
        if gap_s is not None:
            self._metrics.inter_token_latency.observe(gap_s)
        for _ in range(num_tokens - 1):
            self._metrics.inter_token_latency.observe(0.0)

    def ended(self, record: RequestRecord) -> None:
        """One request and its times, at its end."""
        metrics, waterfall = self._metrics, record.waterfall
        metrics.count_request(record.code, record.ending)
        metrics.request_duration.observe(record.duration_s)
        if record.token_waits_s:
            metrics.time_per_output_token.observe(sum(record.token_waits_s) / len(record.token_waits_s))
        if waterfall is None or waterfall.first_token_s is None:
            return
        timing = waterfall.as_timing()
        metrics.time_to_first_token.observe(timing["ttft_s"])
        for stage in labels.TTFT_STAGES:
            metrics.ttft_stage.labels(stage).observe(timing[f"{stage}_s"])
        if waterfall.second_token_s is not None:
            metrics.handoff_gap.observe(timing["handoff_gap_s"])
