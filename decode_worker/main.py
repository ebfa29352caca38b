"""`pdserve decode`: one decode worker process."""

from __future__ import annotations

import os

from pdserve.decode_worker.hand_offs import HandOffs
from pdserve.decode_worker.prefill_peers import PrefillPeers
from pdserve.decode_worker.worker import DecodePart
from pdserve.registration import Role
from pdserve.settings import DecodeSettings, load
from pdserve.worker.parts import WorkerParts
from pdserve.worker.role_worker import RoleWorker
from pdserve.worker.run import run_worker


def main(argv: list[str]) -> int:
    """Run until SIGTERM; settings from flags, environment and file."""
    settings = load(DecodeSettings, argv, os.environ)
    return run_worker(settings, Role.DECODE, lambda worker, parts: make_part(worker, parts, settings))


def make_part(worker: RoleWorker, parts: WorkerParts, settings: DecodeSettings) -> DecodePart:
    """Make what only a decode worker has: its hand-offs, and the prefill workers that it reads from."""
    may_prefill = settings.local_prefill == "auto"
    peers = PrefillPeers(parts.registry, parts.view, parts.transports)
    hand_offs = HandOffs(
        parts.sender,
        worker.engine_thread,
        parts.transports,
        peers,
        worker.watch,
        may_prefill=may_prefill,
        handoff_timeout_s=settings.handoff_timeout_s,
        clock=worker.clock,
    )
    parts.view.on_change(peers.connect)
    interval_s = settings.step_interval_s
    if interval_s is not None:
        worker.engine_thread.space_steps(lambda: interval_s if hand_offs.awaits_prompts else 0.0)
    return DecodePart(worker, hand_offs, peers, may_prefill=may_prefill)
