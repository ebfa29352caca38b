"""The gateway's metrics: what clients experience, on the gateway's own clock.

TTFT, TPOT and ITL are three things: the first token's delay; the mean time per token after it, one sample
per request; the gap between two tokens, one sample per gap.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.metrics import buckets, labels
from pdserve.metrics.labels import initialise

_ENDINGS = (
    *((200, reason) for reason in labels.FINISH_REASONS),
    (499, "cancelled"),
    *((code, "error") for code in labels.CODES if code not in (200, 499)),
)
"""Every pair of code and finish_reason that exists: an error after the first byte is still a 200."""


class GatewayMetrics:
    """All collectors of one gateway.

    Args:
        registry: takes the collectors.
        model: the served name, the only one that a gateway has.
        ttft_slo_s: a target that becomes a border of its histogram, like the two that follow; None adds none.
        tpot_slo_s: the target for the time per output token.
        handoff_slo_s: the target for the gap between the first two tokens.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model: str,
        ttft_slo_s: float | None = None,
        tpot_slo_s: float | None = None,
        handoff_slo_s: float | None = None,
    ) -> None:
        self._model = model
        self.requests = Counter(
            "pd_requests_total",
            "Requests that ended, by HTTP status and outcome.",
            ["model", "code", "finish_reason"],
            registry=registry,
        )
        for code, finish_reason in _ENDINGS:
            self.requests.labels(model, str(code), finish_reason)
        self.generation_tokens = Counter(
            "pd_generation_tokens_total", "Output tokens received from workers, each once.", registry=registry
        )
        self._latencies(registry, ttft_slo_s, tpot_slo_s, handoff_slo_s)
        self._states(registry)
        self._events(registry)

    def _latencies(
        self, registry: CollectorRegistry, ttft_slo_s: float | None, tpot_slo_s: float | None, gap_slo_s: float | None
    ) -> None:
        itl_s = buckets.with_thresholds(buckets.ITL_S, tpot_slo_s)
        self.time_to_first_token = Histogram(
            "pd_time_to_first_token_seconds",
            "From the request's receipt to the first token written to the client; one per successful first token.",
            buckets=buckets.with_thresholds(buckets.TTFT_S, ttft_slo_s),
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "pd_time_per_output_token_seconds",
            "Mean time per output token after the first; one per request.",
            buckets=itl_s,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "pd_inter_token_latency_seconds",
            "Gap between two tokens of one choice; one per gap.",
            buckets=itl_s,
            registry=registry,
        )
        self.request_duration = Histogram(
            "pd_request_duration_seconds",
            "From the request's receipt to its end.",
            buckets=buckets.REQUEST_S,
            registry=registry,
        )
        self.handoff_gap = Histogram(
            "pd_handoff_gap_seconds",
            "Token 1 minus token 0 at the gateway: reservation, KV transfer and first decode step.",
            buckets=buckets.with_thresholds(buckets.TTFT_S, gap_slo_s),
            registry=registry,
        )
        self.ttft_stage = Histogram(
            "pd_ttft_stage_seconds",
            "The stages of TTFT; per request they sum to it exactly.",
            ["stage"],
            buckets=buckets.STAGE_S,
            registry=registry,
        )
        initialise(self.ttft_stage, labels.TTFT_STAGES)

    def _states(self, registry: CollectorRegistry) -> None:
        self.queue_requests = Gauge("pd_queue_requests", "Requests queued in this gateway.", registry=registry)
        self.inflight_requests = Gauge("pd_inflight_requests", "Requests received and not ended.", registry=registry)

    def _events(self, registry: CollectorRegistry) -> None:
        self.redispatch = Counter(
            "pd_redispatch_total",
            "Sequences dispatched again, by where they were and why.",
            ["phase", "reason"],
            registry=registry,
        )
        initialise(self.redispatch, labels.PHASES, labels.REDISPATCH_REASONS)
        self.duplicate_tokens_dropped = Counter(
            "pd_duplicate_tokens_dropped_total",
            "Tokens that arrived a second time and were dropped.",
            registry=registry,
        )
        self.cancelled = Counter(
            "pd_cancelled_total", "Requests cancelled before their end.", ["reason"], registry=registry
        )
        initialise(self.cancelled, labels.CANCEL_REASONS)
        self.shed = Counter(
            "pd_shed_total",
            "Requests answered 429 or 503 because no worker could take them.",
            ["reason"],
            registry=registry,
        )
        initialise(self.shed, labels.SHED_REASONS)

    def count_request(self, code: int, finish_reason: str) -> None:
        """Count an ended request; a pair outside the closed set counts as the nearest one inside."""
        if code not in labels.CODES:
            code = 400 if 400 <= code < 500 else 500
        if (code, finish_reason) not in _ENDINGS:
            finish_reason = {200: "stop", 499: "cancelled"}.get(code, "error")
        self.requests.labels(self._model, str(code), finish_reason).inc()

    def count_redispatch(self, phase: str, reason: str) -> None:
        """Count a re-dispatch; reasons come from workers, unknown ones count as `lost`."""
        self.redispatch.labels(phase, labels.within(reason, labels.REDISPATCH_REASONS, "lost")).inc()
