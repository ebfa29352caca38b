"""`pdserve prefill`: one prefill worker process."""

from __future__ import annotations

import os
import time

from pdserve.prefill_worker.leases import LeaseTable
from pdserve.prefill_worker.offers import Offers
from pdserve.prefill_worker.worker import PrefillLimits, PrefillWorker
from pdserve.registration import Role
from pdserve.settings import PrefillSettings, load
from pdserve.transfer.digest import block_digests
from pdserve.worker.run import WorkerParts, run_worker


def main(argv: list[str]) -> int:
    """Run until SIGTERM; settings from flags, environment and file."""
    settings = load(PrefillSettings, argv, os.environ)
    return run_worker(settings, Role.PREFILL, lambda parts: make_policy(parts, settings))


def make_policy(parts: WorkerParts, settings: PrefillSettings) -> PrefillWorker:
    """Wire the prefill policy."""
    engine = parts.model.engine
    offers = Offers(
        parts.identity,
        engine,
        parts.engine_thread,
        parts.transports,
        parts.bus,
        LeaseTable(settings.kv_lease_s, time.monotonic, lambda: parts.inbox.disconnected_s),
        parts.watch,
        kv_signature=parts.model.kv_signature,
        block_digests=(lambda ids: block_digests(engine.kv_cache, ids)) if settings.integrity == "full" else None,
    )
    return PrefillWorker(
        parts.identity,
        engine,
        parts.engine_thread,
        parts.transports,
        parts.bus,
        parts.attempts,
        offers,
        PrefillLimits(settings.prefill_timeout_s, window_tokens=2 * settings.max_num_batched_tokens),
        parts.watch,
        fingerprint=parts.model.card.fingerprint,
        is_gateway_gone=parts.view.is_gateway_gone,
        is_draining=parts.is_draining,
    )
