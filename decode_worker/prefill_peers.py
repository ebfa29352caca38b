"""The prefill workers that a decode worker reads from: which are registered, and how their blocks are READ."""

from __future__ import annotations

from pdserve.bus.registry import Registry, RegistryView
from pdserve.errors import BusError, TransferError
from pdserve.registration import Role, WorkerRef
from pdserve.transfer.base import Descriptor
from pdserve.worker.transports import WorkerTransports


class PrefillPeers:
    """All prefill workers, as one decode worker sees them.

    Args:
        registry: asked when a worker is not known yet.
        view: the registrations of the last poll.
        transports: choose how blocks are read.
    """

    def __init__(self, registry: Registry, view: RegistryView, transports: WorkerTransports) -> None:
        self._registry = registry
        self._view = view
        self._transports = transports

    def connect(self) -> None:
        """Connect to every prefill worker that is registered, before its first hand-off needs it."""
        for registration in self._view.workers.values():
            if registration.role is Role.PREFILL and registration.kv_signature == self._transports.kv_signature:
                self._transports.prepare(registration)

    async def find(self, prefill: WorkerRef) -> Descriptor | str:
        """How blocks of this very process are read, or a sentence why they cannot be."""
        registration = self._view.workers.get(prefill.worker_id)
        if registration is None or registration.ref != prefill:
            try:
                registration = await self._registry.worker(prefill.worker_id)
            except BusError as error:
                return f"lookup of prefill worker {prefill.worker_id} failed: {error}"
        if registration is None or registration.ref != prefill:
            return f"prefill worker {prefill.worker_id} of generation {prefill.generation} is not registered"
        ours, theirs = self._transports.kv_signature, registration.kv_signature
        if theirs != ours:
            return f"KV signature differs: theirs {theirs}, ours {ours}"
        try:
            return self._transports.find(registration)
        except TransferError as error:
            return str(error)

    def is_gone(self, prefill: WorkerRef) -> bool:
        """Whether this very process is known to be gone."""
        return self._view.is_gone(prefill)
