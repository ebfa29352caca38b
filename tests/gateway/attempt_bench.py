"""A sequence's state machine on the bench: short words for what workers say, and for what it wants done."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from pdserve.gateway.dispatch import recovery
from pdserve.gateway.dispatch.actions import Action, Emit, Send
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import FinishedEvent, GenerationRequest, Sender, TokensEvent
from pdserve.messages import (
    AttemptKey,
    Failed,
    Finished,
    Message,
    RosterItem,
    SequenceTokens,
    Started,
)
from pdserve.reasons import FailReason, FinishReason, SequenceState
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams

P, P2 = WorkerRef("P", "1"), WorkerRef("P2", "1")
D, D2 = WorkerRef("D", "1"), WorkerRef("D2", "1")
LIMITS = RetryLimits(max_attempts=3, kv_lease_s=10.0, progress_timeout_s=20.0)
M = TypeVar("M", bound=Message)


def hear_tokens(machine: SequenceMachine, item: SequenceTokens, worker: WorkerRef, now_s: float) -> list[Action]:
    """The short way where it applies, as the gateway takes it."""
    event = machine.next_tokens(item, worker, now_s)
    return machine.on_tokens(item, worker, now_s) if event is None else [Emit(event)]


class Bench:
    """A machine with short words for what workers say."""

    def __init__(self, *, max_tokens: int = 8, limits: RetryLimits = LIMITS, **sampling: Any) -> None:
        nonces = itertools.count()
        eos = frozenset[int]() if sampling.get("ignore_eos") else frozenset({99})
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            n=1,
            sampling=SamplingParams(seed=5, max_tokens=max_tokens, **sampling),
            deadline_s=100.0,
            received_s=0.0,
            terminal_ids=frozenset(sampling.get("stop_token_ids", ())) | eos,
        )
        sender = Sender("gw", "f")
        self.machine = SequenceMachine(request, 0, sender, limits, lambda: f"nonce{next(nonces)}")
        self.now_s = 0.0

    @property
    def key(self) -> AttemptKey:
        assert self.machine.attempt is not None
        return self.machine.attempt.key

    def at(self, now_s: float) -> Bench:
        self.now_s = now_s
        return self

    def dispatch(self, worker: WorkerRef = P) -> list[Action]:
        return self.machine.dispatch(worker, self.now_s, 0)

    def assign(self, worker: WorkerRef = D) -> list[Action]:
        return self.machine.assign_decode(worker, self.now_s, 0)

    def started(self, worker: WorkerRef = P, key: AttemptKey | None = None) -> list[Action]:
        message = Started(
            **(key or self.key)._asdict(),
            worker_id=worker.worker_id,
            generation=worker.generation,
            num_cached_tokens=0,
            schedule_s=0.0,
        )
        return self.machine.on_started(message, worker, self.now_s)

    def tokens(self, index: int, *token_ids: int, worker: WorkerRef, key: AttemptKey | None = None) -> list[Action]:
        item = SequenceTokens(**(key or self.key)._asdict(), index=index, token_ids=list(token_ids))
        return hear_tokens(self.machine, item, worker, self.now_s)

    def finished(self, num_output_tokens: int, *, worker: WorkerRef, reason: str = "length") -> list[Action]:
        message = Finished(
            **self.key._asdict(),
            worker_id=worker.worker_id,
            generation=worker.generation,
            finish_reason=FinishReason(reason),
            num_output_tokens=num_output_tokens,
        )
        return self.machine.on_finished(message, worker, self.now_s)

    def failed(self, reason: str, *, worker: WorkerRef, retryable: bool = True, in_step: bool = False) -> list[Action]:
        message = Failed(
            **self.key._asdict(),
            worker_id=worker.worker_id,
            generation=worker.generation,
            reason=FailReason(reason),
            retryable=retryable,
            was_in_step=in_step,
        )
        return recovery.on_failed(self.machine, message, worker, self.now_s)

    def roster(
        self, worker: WorkerRef, state: str | None = None, next_index: int = 0, *, epoch: int = 0, up_s: float = 0.0
    ) -> list[Action]:
        item = (
            None
            if state is None
            else RosterItem(**self.key._asdict(), state=SequenceState(state), next_index=next_index)
        )
        return recovery.on_roster(self.machine, item, worker, self.now_s, epoch=epoch, bus_up_since_s=up_s)

    def gone(self, worker: WorkerRef) -> list[Action]:
        return recovery.on_worker_gone(self.machine, worker, self.now_s)

    def tick(self) -> list[Action]:
        return recovery.on_tick(self.machine, self.now_s)

    def until_started(self) -> Bench:
        self.dispatch()
        self.started()
        return self

    def until_token0(self) -> Bench:
        self.until_started().assign()
        self.tokens(0, 10, worker=P)
        return self

    def until_decoding(self) -> Bench:
        self.until_token0().tokens(0, 10, 11, worker=D)
        return self


def sent(actions: Sequence[Action], kind: type[M]) -> list[tuple[WorkerRef, M]]:
    return [(a.worker, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def of(actions: Sequence[Action], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def emitted(actions: Sequence[Action]) -> list[tuple[int, list[int]]]:
    return [(a.event.index, a.event.token_ids) for a in of(actions, Emit) if isinstance(a.event, TokensEvent)]


def ends(actions: Sequence[Action]) -> list[FinishedEvent]:
    return [a.event for a in of(actions, Emit) if isinstance(a.event, FinishedEvent)]
