"""`pdserve prefill`: one prefill worker process."""

from __future__ import annotations

import os

from pdserve.prefill_worker.leases import LeaseTable
from pdserve.prefill_worker.offers import Offers
from pdserve.prefill_worker.worker import PrefillPart
from pdserve.registration import Role
from pdserve.settings import PrefillSettings, load
from pdserve.transfer.digest import block_digests
from pdserve.worker.parts import WorkerParts
from pdserve.worker.role_worker import RoleWorker
from pdserve.worker.run import run_worker


def main(argv: list[str]) -> int:
    """Run until SIGTERM; settings from flags, environment and file."""
    settings = load(PrefillSettings, argv, os.environ)
    return run_worker(settings, Role.PREFILL, lambda worker, parts: make_part(worker, parts, settings))


def make_part(worker: RoleWorker, parts: WorkerParts, settings: PrefillSettings) -> PrefillPart:
    """Make what only a prefill worker has: its offers, and the leases on them."""
    kv_cache = worker.engine_thread.engine.kv_cache
    offers = Offers(
        parts.sender,
        worker.engine_thread,
        parts.transports,
        LeaseTable(settings.kv_lease_s, worker.clock, lambda: parts.inbox.disconnected_s),
        worker.watch,
        block_digests=(lambda ids: block_digests(kv_cache, ids)) if settings.integrity == "full" else None,
    )
    return PrefillPart(worker, offers, window_tokens=2 * settings.max_num_batched_tokens)
