"""What is dispatched: one choice of one request, until its end, and what it holds at workers. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import Generation
from pdserve.gateway.routing.router import Demand
from pdserve.registration import WorkerRef, WorkerRegistration


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One choice of one request; the request itself is `generation.request`."""

    machine: SequenceMachine
    generation: Generation
    demand: Demand
    """What the current or the next attempt asks for; shared by the choices of a request at first."""
    prefill: WorkerRegistration | None = None
    """The prefill worker of the current attempt, as it was registered at dispatch."""
    num_guessed_tokens: int = 0
    """Prefix hits that were expected of it."""
    held_prefill: WorkerRef | None = None
    """Where the prefill window is charged."""
    held_decode: WorkerRef | None = None
    """Where the decode window is charged."""
