"""Registrations of workers for tests, with everything that does not matter filled in."""

from __future__ import annotations

from typing import Any

from pdserve.registration import Role, WorkerLoad, WorkerRegistration, WorkerState


def registration(worker_id: str, role: Role, **changes: Any) -> WorkerRegistration:
    """A ready worker of model "f" with signature "kv" and plenty of room."""
    load = {name: changes.pop(name) for name in WorkerLoad.__struct_fields__ if name in changes}
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": role,
        "generation": "1",
        "state": WorkerState.READY,
        "pid": 1,
        "url": "",
        "model": "m",
        "fingerprint": "f",
        "kv_signature": "kv",
        "block_size": 4,
        "num_blocks": 100,
        "max_model_len": 1000,
        "window": 200,
        "load": WorkerLoad(**{"num_available_blocks": 100, **load}),
    }
    return WorkerRegistration(**{**values, **changes})


def prefill(worker_id: str = "P", **changes: Any) -> WorkerRegistration:
    """A prefill worker."""
    return registration(worker_id, Role.PREFILL, **changes)


def decode(worker_id: str = "D", **changes: Any) -> WorkerRegistration:
    """A decode worker."""
    return registration(worker_id, Role.DECODE, **changes)


def pool(*workers: WorkerRegistration) -> dict[str, WorkerRegistration]:
    """As a registry view shows them."""
    return {worker.worker_id: worker for worker in workers}
