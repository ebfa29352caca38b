"""`pdserve decode`: one decode worker process."""

from __future__ import annotations

import os

from pdserve.decode_worker.hand_offs import HandOffs
from pdserve.decode_worker.worker import DecodeWorker
from pdserve.registration import Role
from pdserve.settings import DecodeSettings, load
from pdserve.worker.run import WorkerParts, run_worker


def main(argv: list[str]) -> int:
    """Run until SIGTERM; settings from flags, environment and file."""
    settings = load(DecodeSettings, argv, os.environ)
    return run_worker(settings, Role.DECODE, lambda parts: make_policy(parts, settings))


def make_policy(parts: WorkerParts, settings: DecodeSettings) -> DecodeWorker:
    """Wire the decode policy."""
    may_prefill = settings.local_prefill == "auto"
    hand_offs = HandOffs(
        parts.identity,
        parts.model.engine,
        parts.engine_thread,
        parts.transports,
        parts.bus,
        parts.registry,
        parts.view,
        parts.watch,
        kv_signature=parts.model.kv_signature,
        may_prefill=may_prefill,
        handoff_timeout_s=settings.handoff_timeout_s,
    )
    worker = DecodeWorker(
        parts.identity,
        parts.model.engine,
        parts.engine_thread,
        parts.transports,
        parts.bus,
        parts.attempts,
        hand_offs,
        parts.watch,
        fingerprint=parts.model.card.fingerprint,
        may_prefill=may_prefill,
        is_gateway_gone=parts.view.is_gateway_gone,
        is_draining=parts.is_draining,
    )
    parts.view.on_change(hand_offs.connect_to_peers)
    interval_s = settings.step_interval_s
    if interval_s is not None:
        parts.engine_thread.space_steps(lambda: interval_s if hand_offs.awaits_prompts else 0.0)
    return worker
