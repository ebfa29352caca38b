"""The state machine against a whole simulated world: whatever the bus does, no token is lost, doubled or reordered."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from attempt_bench import hear_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_workers import Faults, SimulatedWorker, World, scores_of

from pdserve.errors import RequestError
from pdserve.gateway.dispatch import recovery
from pdserve.gateway.dispatch.actions import Action, Emit, Fail, Requeue, Score, Send, WantDecode
from pdserve.gateway.dispatch.outcomes import RetryLimits
from pdserve.gateway.dispatch.sequence_machine import SequenceMachine
from pdserve.gateway.generation.request import FinishedEvent, GenerationRequest, Sender, TokensEvent
from pdserve.messages import Failed, Finished, PromptLogprobs, Roster, Started, TokenBatch, TokenLogprobs
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams

PROMPT = [7, 8, 9]
DEADLINE_S = 300.0
GONE_AFTER_S = 4.0
RESTART_AFTER_S = 6.0
MESSAGES = (
    "PrefillJob",
    "DecodeJob",
    "Started",
    "PromptLogprobs",
    "TokenBatch",
    "Finished",
    "Failed",
    "Roster",
    "Cancel",
    "ResendTokens",
)


@dataclass
class Run:
    """The gateway's side: a trivial choice of workers around the machine under test."""

    world: World
    machine: SequenceMachine
    crashes: dict[float, str] = field(default_factory=dict)
    """Time → name of the worker that dies then."""
    client: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    finished: list[FinishedEvent] = field(default_factory=list)
    errors: list[RequestError] = field(default_factory=list)
    not_before_s: float = 0.0
    is_decode_wanted: bool = False

    def play(self) -> None:
        for step in itertools.count(1):
            now_s = step * 0.1
            self._crash_and_restart(now_s)
            for message in self.world.advance(now_s):
                self._hear(message, now_s)
            self._place(now_s)
            self._do(recovery.on_tick(self.machine, now_s))
            if self.machine.is_done:
                return
            assert now_s < DEADLINE_S + 1, f"still {self.machine.phase} after the deadline"

    def _alive(self, *, is_prefill: bool) -> list[WorkerRef]:
        return [
            ref
            for ref, worker in self.world.workers.items()
            if worker.is_prefill is is_prefill
            and (worker.crashed_s is None or self.world.now_s - worker.crashed_s < GONE_AFTER_S)
        ]

    def _crash_and_restart(self, now_s: float) -> None:
        for at_s, name in list(self.crashes.items()):
            if now_s >= at_s:
                del self.crashes[at_s]
                for ref, worker in self.world.workers.items():
                    if ref.worker_id == name and worker.crashed_s is None:
                        worker.crashed_s = now_s
        for ref, worker in list(self.world.workers.items()):
            if worker.crashed_s is None:
                continue
            if now_s - worker.crashed_s >= GONE_AFTER_S:
                self._do(recovery.on_worker_gone(self.machine, ref, now_s))
            reborn = WorkerRef(ref.worker_id, ref.generation + "+")
            if now_s - worker.crashed_s >= RESTART_AFTER_S and reborn not in self.world.workers:
                self.world.add(
                    SimulatedWorker(self.world, reborn, is_prefill=worker.is_prefill, stop_token=worker.stop_token)
                )

    def _hear(self, message: object, now_s: float) -> None:
        assert isinstance(message, Started | PromptLogprobs | TokenBatch | Finished | Failed | Roster)
        worker, machine = message.worker, self.machine
        if isinstance(message, TokenBatch):
            self._do(hear_tokens(machine, message.items[0], worker, now_s))
        elif isinstance(message, PromptLogprobs):
            self._do(machine.on_prompt_logprobs(message, worker, now_s))
        elif isinstance(message, Started):
            self._do(machine.on_started(message, worker, now_s))
        elif isinstance(message, Finished):
            self._do(machine.on_finished(message, worker, now_s))
        elif isinstance(message, Failed):
            self._do(recovery.on_failed(machine, message, worker, now_s))
        else:
            key = machine.attempt.key if machine.attempt is not None else None
            item = next((item for item in message.items if item.key == key), None)
            self._do(recovery.on_roster(machine, item, worker, now_s, epoch=0, bus_up_since_s=0.0))

    def _place(self, now_s: float) -> None:
        machine, rng = self.machine, self.world.rng
        if machine.phase == "queued" and now_s >= self.not_before_s:
            prefill = self._alive(is_prefill=True)
            if prefill:
                self._do(machine.dispatch(rng.choice(prefill), now_s, 0))
        if self.is_decode_wanted and machine.attempt is not None and machine.wants_decode:
            decode = self._alive(is_prefill=False)
            usable = [ref for ref in decode if ref not in machine.attempt.refused]
            if usable:
                self.is_decode_wanted = False
                self._do(machine.assign_decode(rng.choice(usable), now_s, 0))
            elif decode:
                self._do(recovery.on_all_refused(machine, now_s))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(worker=worker, message=message):
                    self.world.send(worker, message)
                case Emit(event=TokensEvent() as event):
                    assert not self.finished, "tokens after the end"
                    assert self.scores == self.expected_scores, "a token came before the prompt's scores"
                    assert event.index == len(self.client), "a token was lost, doubled or reordered"
                    self.client.extend(event.token_ids)
                case Emit(event=FinishedEvent() as event):
                    self.finished.append(event)
                case Score(logprobs=logprobs):
                    self.scores.extend(logprobs)
                case WantDecode():
                    self.is_decode_wanted = True
                case Requeue(not_before_s=not_before_s):
                    self.not_before_s = not_before_s
                case Fail(error=error):
                    self.errors.append(error)

    @property
    def expected_scores(self) -> list[TokenLogprobs]:
        return [] if self.machine.request.sampling.prompt_logprobs is None else scores_of(PROMPT)

    def check(self) -> None:
        """What must hold after every run, good or bad."""
        assert len(self.finished) + len(self.errors) == 1, "not exactly one end"
        for index, token in enumerate(self.client):
            history = (*PROMPT, *self.client[:index])
            assert token in self.world.produced[history], f"token {index} does not continue what the client has"
        if self.finished:
            assert self.finished[0].num_output_tokens == len(self.client)
            assert self.scores == self.expected_scores, "a score was lost, doubled or reordered"


def start(
    seed: int,
    *,
    faults: Faults | None = None,
    max_tokens: int = 12,
    stop_token: int | None = None,
    num_decode: int = 2,
    is_deterministic: bool = False,
    refuse_rate: float = 0.0,
    max_attempts: int = 10,
    is_scored: bool = False,
) -> Run:
    world = World(seed, faults or Faults(), is_deterministic=is_deterministic, refuse_rate=refuse_rate)
    for name in ("P0", "P1"):
        world.add(SimulatedWorker(world, WorkerRef(name, "g"), is_prefill=True, stop_token=stop_token))
    for number in range(num_decode):
        ref = WorkerRef(f"D{number}", "g")
        world.add(SimulatedWorker(world, ref, is_prefill=False, stop_token=stop_token))
    nonces = itertools.count()
    stop_token_ids = () if stop_token is None else (stop_token,)
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        n=1,
        sampling=SamplingParams(
            seed=1,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            prompt_logprobs=0 if is_scored else None,
        ),
        deadline_s=DEADLINE_S,
        received_s=0.0,
        terminal_ids=frozenset(stop_token_ids),
    )
    limits = RetryLimits(max_attempts=max_attempts)
    machine = SequenceMachine(request, 0, Sender("g", "f"), limits, lambda: f"n{next(nonces)}")
    return Run(world, machine)


def test_without_faults_one_attempt_and_one_prefill_do_it() -> None:
    run = start(0)
    run.play()
    run.check()
    assert (run.machine.num_attempts, run.world.num_prefills, len(run.client)) == (1, 1, 12)


@settings(max_examples=600, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(0.02, 1.0),
    budget=st.integers(1, 10),
    only=st.sampled_from([None, *MESSAGES]),
    max_tokens=st.integers(1, 30),
    stop_token=st.sampled_from([None, 3, 17]),
    num_decode=st.integers(1, 3),
    is_scored=st.booleans(),
)
def test_lost_doubled_late_and_reordered_messages_cost_time_and_never_a_token(
    seed: int,
    rate: float,
    budget: int,
    only: str | None,
    max_tokens: int,
    stop_token: int | None,
    num_decode: int,
    is_scored: bool,
) -> None:
    run = start(
        seed,
        faults=Faults(rate, budget, only),
        max_tokens=max_tokens,
        stop_token=stop_token,
        num_decode=num_decode,
        is_scored=is_scored,
    )
    run.play()
    run.check()
    assert run.finished, f"failed though every worker is well: {run.errors}"
    is_complete = len(run.client) == max_tokens or run.client[-1] == stop_token
    assert is_complete, f"{len(run.client)} of {max_tokens} tokens"


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    budget=st.integers(0, 6),
    crashes=st.lists(st.tuples(st.floats(0.0, 8.0), st.sampled_from(["P0", "P1", "D0", "D1"])), max_size=3),
    max_tokens=st.integers(1, 60),
    is_scored=st.booleans(),
)
def test_dying_workers_end_in_a_whole_answer_or_one_error(
    seed: int, budget: int, crashes: list[tuple[float, str]], max_tokens: int, is_scored: bool
) -> None:
    run = start(seed, faults=Faults(0.2, budget), max_tokens=max_tokens, is_scored=is_scored)
    run.crashes = dict(crashes)
    run.play()
    run.check()
    if len(crashes) <= 1:
        assert run.finished, f"one death is no reason to fail: {run.errors}"
        assert len(run.client) == max_tokens


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), crash_s=st.floats(0.0, 4.0), name=st.sampled_from(["P0", "P1", "D0", "D1"]))
def test_with_deterministic_workers_a_death_changes_no_token(seed: int, crash_s: float, name: str) -> None:
    calm, disturbed = start(seed, is_deterministic=True), start(seed, is_deterministic=True)
    disturbed.crashes = {crash_s: name}
    calm.play()
    disturbed.play()
    assert disturbed.client == calm.client


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), refuse_rate=st.floats(0.1, 0.9), num_decode=st.integers(1, 3))
def test_decode_workers_without_room_never_fail_a_request(seed: int, refuse_rate: float, num_decode: int) -> None:
    run = start(seed, refuse_rate=refuse_rate, num_decode=num_decode, max_attempts=1)
    run.play()
    run.check()
    assert run.finished, "no_capacity counted as an attempt"


@pytest.mark.parametrize("seed", range(20))
def test_a_refused_hand_off_goes_to_another_decode_worker_without_computing_the_prompt_again(seed: int) -> None:
    run = start(seed, refuse_rate=0.0, num_decode=3)
    first = {"is_first": True}
    for worker in run.world.workers.values():
        if not worker.is_prefill:
            original = worker._take

            def take(job: object, original: object = original, worker: SimulatedWorker = worker) -> None:
                if first["is_first"]:
                    first["is_first"] = False
                    worker.tombstones.add(job.key)  # type: ignore[attr-defined]
                    worker._fail(job, "no_capacity")  # type: ignore[arg-type]
                else:
                    original(job)  # type: ignore[operator]

            worker._take = take  # type: ignore[method-assign]
    run.play()
    run.check()
    assert (run.machine.num_attempts, run.world.num_prefills) == (1, 1)
