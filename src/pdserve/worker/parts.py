"""What a worker is put together from, beside its engine and its HTTP port. The wiring, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bus.bus import Bus
from pdserve.bus.registry import Registry, RegistryView
from pdserve.ids import Fingerprint
from pdserve.worker.admission import Admission
from pdserve.worker.attempts import Attempts
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.identity import Identity
from pdserve.worker.inbox import Inbox
from pdserve.worker.role_worker import RolePart, RoleWorker
from pdserve.worker.sender import Sender
from pdserve.worker.transports import WorkerTransports
from pdserve.worker.watch import WorkerWatch

_MAX_HEARTBEATS_KEPT = 3
"""Tokens of finished sequences can be asked for again for this many heartbeats."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a role's part can be made of, beside the worker that it belongs to."""

    bus: Bus
    sender: Sender
    inbox: Inbox
    registry: Registry
    view: RegistryView
    transports: WorkerTransports

    @classmethod
    def on(
        cls,
        bus: Bus,
        identity: Identity,
        transports: WorkerTransports,
        *,
        heartbeat_s: float,
        publish_delay_s: Callable[[], float] = lambda: 0.0,
    ) -> WorkerParts:
        """Everything that needs the bus alone; registrations are polled every `heartbeat_s`."""
        sender = Sender(identity, bus, publish_delay_s)
        return cls(bus, sender, Inbox(bus), Registry(bus), RegistryView(bus, heartbeat_s), transports)


MakePart = Callable[[RoleWorker, WorkerParts], RolePart]
"""(worker, parts): the part of one role."""


def make_worker(
    parts: WorkerParts,
    engine_thread: EngineThread,
    watch: WorkerWatch,
    make_part: MakePart,
    *,
    fingerprint: Fingerprint,
    heartbeat_s: float,
    prefill_timeout_s: float,
) -> RoleWorker:
    """Make a worker of the role whose part `make_part` makes; `fingerprint` is its model's."""
    return RoleWorker(
        engine_thread,
        Attempts(parts.sender, keep_s=_MAX_HEARTBEATS_KEPT * heartbeat_s),
        Admission(fingerprint, engine_thread.engine.vocab_size),
        watch,
        lambda worker: make_part(worker, parts),
        prefill_timeout_s=prefill_timeout_s,
        is_gateway_gone=parts.view.is_gateway_gone,
        clock=parts.bus.clock,
    )
