"""The sequences in the gateway's hands: state machine, client, and what each holds at workers. Data only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.dispatch.waiting_queue import QueueEntry
from pdserve.gateway.generation.request import AttemptRecord, Generation
from pdserve.gateway.routing.placement import Demand
from pdserve.messages import SequenceKey
from pdserve.registration import WorkerRef, WorkerRegistration


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One choice of one request, until its end."""

    machine: SequenceMachine
    generation: Generation
    demand: Demand
    """Of the current or the next attempt; shared by the choices of a request at first."""
    prefill: WorkerRegistration | None = None
    """The prefill worker of the current attempt, as it was registered at dispatch."""
    num_guessed_tokens: int = 0
    """Prefix hits that were expected of it."""
    entry: QueueEntry[list[LiveSequence]] | None = None
    """While queued."""
    held_prefill: WorkerRef | None = None
    """Where the prefill window is charged."""
    held_decode: WorkerRef | None = None
    """Where the decode window is charged."""

    @property
    def key(self) -> SequenceKey:
        """Identity within the gateway."""
        return self.machine.spec.key

    def workers(self) -> list[WorkerRef]:
        """Workers that may hold the current attempt."""
        attempt = self.machine.attempt
        return [holder.worker for holder in attempt.holders()] if attempt is not None else []

    def note_attempt(self) -> None:
        """Bring the timeline's record of the current attempt up to date."""
        attempt = self.machine.attempt
        if attempt is None:
            return
        prefill, decode = attempt.prefill, attempt.decode
        key = self.key.choice, attempt.key.attempt
        self.generation.timeline.attempts[key] = AttemptRecord(
            *key,
            prefill=prefill.worker.worker_id if prefill is not None else None,
            decode=decode.worker.worker_id if decode is not None else None,
            reason="",
        )

    def note_attempt_end(self, reason: str) -> None:
        """The last attempt ended without finishing."""
        attempts, key = self.generation.timeline.attempts, (self.key.choice, self.machine.num_attempts)
        if key in attempts:
            attempts[key] = replace(attempts[key], reason=reason)


class LiveTable:
    """All live sequences, by key and by request. Iteration is over snapshots: entries may go meanwhile."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], LiveSequence] = {}
        self._by_request: dict[str, list[LiveSequence]] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_requests(self) -> int:
        """Requests with a sequence that has not ended."""
        return len(self._by_request)

    def add(self, request_id: str, sequences: list[LiveSequence]) -> None:
        """All choices of a new request."""
        assert request_id not in self._by_request, f"request id {request_id} is taken"
        self._by_request[request_id] = list(sequences)
        self._by_key.update({live.key: live for live in sequences})
        self._is_empty.clear()

    def remove(self, live: LiveSequence) -> None:
        """The sequence is over; again: nothing."""
        if self._by_key.pop(live.key, None) is None:
            return
        siblings = self._by_request[live.key.request_id]
        siblings.remove(live)
        if not siblings:
            del self._by_request[live.key.request_id]
        if not self._by_request:
            self._is_empty.set()

    def get(self, request_id: str, choice: int) -> LiveSequence | None:
        """One sequence; None when it is over or was never here."""
        return self._by_key.get((request_id, choice))

    def of_request(self, request_id: str) -> list[LiveSequence]:
        """The sequences of a request that are not over."""
        return list(self._by_request.get(request_id, ()))

    def all(self) -> list[LiveSequence]:
        """Every live sequence."""
        return list(self._by_key.values())

    def first_of_each_request(self) -> list[LiveSequence]:
        """One sequence per request."""
        return [sequences[0] for sequences in self._by_request.values()]

    async def wait_until_empty(self) -> None:
        """Until the last sequence is over."""
        await self._is_empty.wait()
