"""What a worker tells of itself: metrics of its doings, and load for its registration. Never decides anything."""

from __future__ import annotations

from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.kv.block_pool import LedgerReport
from pdserve.metrics import labels
from pdserve.metrics.worker import WorkerMetrics
from pdserve.reasons import KvFailReason, TransferReason
from pdserve.registration import WorkerLoad
from pdserve.transfer.pulls.pull import PullOutcome
from pdserve.worker.rates import StepRates

_TRANSFER_RESULTS: dict[TransferReason | None, str] = {
    None: "ok",
    TransferReason.TIMEOUT: "timeout",
    TransferReason.ABORTED: "aborted",
    TransferReason.VERIFY: "mismatch",
    TransferReason.GEOMETRY: "rejected",
}
"""Outcomes of READs as the metric names them; all others are "failed"."""


class WorkerWatch:
    """Notes events as metrics; reads sizes from the engine when asked (lengths only, so from any thread)."""

    def __init__(self, metrics: WorkerMetrics, engine: Engine) -> None:
        self._metrics = metrics
        self._engine = engine
        metrics.set_cache_config(block_size=engine.block_size, num_blocks=engine.block_pool.num_blocks)

    # --- events

    def job(self, result: str) -> None:
        """accepted | rejected | finished | failed | cancelled."""
        self._metrics.jobs.labels(result).inc()

    def late_message(self, reason: str) -> None:
        """unknown | cancelled | finished | stale | nonce | generation."""
        self._metrics.late_messages_dropped.labels(reason).inc()

    def hand_off_rejected(self, reason: KvFailReason) -> None:
        """A decode worker's wish was refused."""
        self._metrics.handoff_rejected.labels(labels.within(reason, labels.HANDOFF_REJECTIONS, "unknown")).inc()

    def lease_expired(self) -> None:
        """A KV lease was not renewed in time."""
        self._metrics.kv_leases_expired.inc()

    def pulled(self, backend: str, outcome: PullOutcome) -> None:
        """READs of one announcement ended."""
        transfer = self._metrics.transfer
        result = _TRANSFER_RESULTS.get(outcome.reason, "failed")
        transfer.results.labels(backend, result).inc()
        if result == "mismatch":
            transfer.digest_mismatches.inc()

    def received(self, backend: str, seconds: float, num_bytes: int) -> None:
        """A whole hand-off was received."""
        self._metrics.transfer.seconds.labels(backend).observe(seconds)
        self._metrics.transfer.bytes.labels(backend).observe(num_bytes)

    def local_prefill(self, num_tokens: int) -> None:
        """A failed hand-off is computed here."""
        self._metrics.recomputed_tokens.inc(num_tokens)

    def step(self, output: StepOutput) -> None:
        """One step of the engine."""
        metrics = self._metrics
        metrics.preemptions.inc(len(output.preempted))
        for sequence in output.preempted:
            metrics.recomputed_tokens.inc(sequence.num_tokens)
        for sequence in output.started:
            metrics.prefix_cache_tokens.labels("hit").inc(sequence.num_cached_tokens)
            metrics.prefix_cache_tokens.labels("miss").inc(sequence.num_prompt_tokens - sequence.num_cached_tokens)
        if output.num_tokens:
            metrics.step.observe(output.duration_s)
            metrics.step_tokens.observe(output.num_tokens)
            metrics.batch_size.observe(len(output.tokens) + sum(s.num_uncomputed_tokens > 0 for s in output.progressed))

    def loaded(self, seconds: float) -> None:
        """Loading and warm-up took this long."""
        self._metrics.model_load.set(seconds)

    # --- states

    def refresh(self, report: LedgerReport, *, num_pulls: int, is_draining: bool) -> None:
        """Set all gauges from real state, at the moment of a scrape."""
        metrics, scheduler = self._metrics, self._engine.scheduler
        metrics.set_kv_blocks(report.by_state)
        metrics.num_requests_running.set(len(scheduler.running))
        metrics.num_requests_waiting.set(len(scheduler.waiting))
        metrics.waiting_tokens.set(scheduler.num_waiting_tokens)
        metrics.transfer.inflight.set(num_pulls)
        metrics.draining.set(is_draining)

    def num_available_blocks(self) -> int:
        """Blocks that an admission could take now."""
        return max(0, self._engine.block_pool.num_available - self._engine.scheduler.watermark_blocks)

    def load(self, rates: StepRates) -> WorkerLoad:
        """This worker's load, for its registration."""
        scheduler = self._engine.scheduler
        return WorkerLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.num_waiting_tokens,
            num_available_blocks=self.num_available_blocks(),
            tokens_per_s=rates.tokens_per_s,
            step_s=rates.step_s,
        )
