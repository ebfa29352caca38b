"""A small world for the state machine: honest prefill and decode workers, a bus that misbehaves, virtual time.

Written from the protocol's description alone: it shares no code with the gateway but the messages. Every token is
a function of its whole history, and the world remembers which worker produced which token after which history:
a client's output is right exactly when each of its tokens was produced after exactly the tokens before it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from pdserve.messages import (
    AttemptKey,
    Cancel,
    DecodeJob,
    Failed,
    Finished,
    Message,
    PrefillJob,
    PromptLogprobs,
    ResendTokens,
    Roster,
    RosterItem,
    SequenceTokens,
    Started,
    TokenBatch,
    TokenLogprobs,
)
from pdserve.registration import WorkerRef

LEASE_S = 10.0
HANDOFF_TIMEOUT_S = 8.0
KEPT_S = 3.0


@dataclass
class Faults:
    """What the bus does to messages, while the budget lasts."""

    rate: float = 0.0
    budget: int = 0
    only: str | None = None
    """Name of the one message type that is hit; None: all."""
    max_delay_s: float = 3.0


@dataclass
class Held:
    """A sequence at a worker."""

    job: PrefillJob | DecodeJob
    state: str
    since_s: float
    tokens: list[int] = field(default_factory=list)
    finish: Finished | None = None
    ended_s: float | None = None

    @property
    def first_index(self) -> int:
        return len(self.job.prompt_token_ids) - self.job.num_original_prompt_tokens

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.tokens)


def scores_of(prompt: list[int]) -> list[TokenLogprobs]:
    """What every worker tells of a prompt's tokens but the first."""
    return [TokenLogprobs(logprob=-float(token), top_token_ids=[], top_logprobs=[]) for token in prompt[1:]]


class World:
    """Time, channels and workers."""

    def __init__(self, seed: int, faults: Faults, *, is_deterministic: bool, refuse_rate: float = 0.0) -> None:
        self.rng, self.faults, self.refuse_rate = random.Random(seed), faults, refuse_rate
        self.is_deterministic = is_deterministic
        self.now_s = 0.0
        self.produced: dict[tuple[int, ...], set[int]] = {}
        self.workers: dict[WorkerRef, SimulatedWorker] = {}
        self.num_prefills = 0
        self._numbers = itertools.count()
        self._in_flight: list[tuple[float, int, WorkerRef | None, Message]] = []

    def add(self, worker: SimulatedWorker) -> None:
        self.workers[worker.ref] = worker

    def send(self, to: WorkerRef | None, message: Message) -> None:
        """Deliver soon, in order, unless the bus misbehaves; None is the gateway."""
        times = [self.now_s + 0.01]
        is_hit = self.faults.only in (None, type(message).__name__) and self.rng.random() < self.faults.rate
        if is_hit and self.faults.budget > 0:
            self.faults.budget -= 1
            late_s = times[0] + self.rng.random() * self.faults.max_delay_s
            times = self.rng.choice([[], [late_s], [times[0], times[0]], [times[0], late_s]])
        for time_s in times:
            heapq.heappush(self._in_flight, (time_s, next(self._numbers), to, message))

    def advance(self, to_s: float) -> list[Message]:
        """Run the world until `to_s`; what has arrived at the gateway by then."""
        self.now_s = to_s
        for worker in self.workers.values():
            worker.step(to_s)
        arrived: list[Message] = []
        while self._in_flight and self._in_flight[0][0] <= to_s:
            _, _, to, message = heapq.heappop(self._in_flight)
            if to is None:
                arrived.append(message)
            elif to in self.workers:
                self.workers[to].receive(message)
        return arrived

    def sample(self, history: list[int], key: AttemptKey) -> int:
        """The next token after `history`; remembered as produced."""
        salt = "" if self.is_deterministic else key.nonce
        token = random.Random(f"{history}{salt}").randrange(1, 50)
        self.produced.setdefault(tuple(history), set()).add(token)
        return token


class SimulatedWorker:
    """Either role; a crash silences it."""

    def __init__(self, world: World, ref: WorkerRef, *, is_prefill: bool, stop_token: int | None = None) -> None:
        self.world, self.ref, self.is_prefill, self.stop_token = world, ref, is_prefill, stop_token
        self.held: dict[AttemptKey, Held] = {}
        self.tombstones: set[AttemptKey] = set()
        self.crashed_s: float | None = None
        self._last_roster_s = world.rng.random()

    # --- the bus

    def receive(self, message: Message) -> None:
        if self.crashed_s is not None:
            return
        if isinstance(message, Cancel):
            self.tombstones.add(message.key)
            self.held.pop(message.key, None)
        elif isinstance(message, ResendTokens) and message.key in self.held:
            self._resend(self.held[message.key], message)
        elif isinstance(message, PrefillJob | DecodeJob) and message.key not in self.tombstones:
            self._take(message)

    def _take(self, job: PrefillJob | DecodeJob) -> None:
        self.tombstones.add(job.key)
        if isinstance(job, DecodeJob) and self.world.rng.random() < self.world.refuse_rate:
            self._fail(job, "no_capacity")
            return
        is_handoff = isinstance(job, DecodeJob) and job.prefill_worker_id is not None
        self.held[job.key] = Held(job, "receiving" if is_handoff else "waiting", self.world.now_s)

    def _say(self, *messages: Message) -> None:
        for message in messages:
            self.world.send(None, message)

    def _about(self, job: PrefillJob | DecodeJob) -> dict[str, object]:
        key = job.key._asdict()
        return {**key, "worker_id": self.ref.worker_id, "generation": self.ref.generation}

    def _fail(self, job: PrefillJob | DecodeJob, reason: str) -> None:
        self.held.pop(job.key, None)
        self._say(Failed(**self._about(job), reason=reason, retryable=True))  # type: ignore[arg-type]

    def _batch(self, held: Held, index: int) -> TokenBatch:
        tokens = held.tokens[index - held.first_index :]
        item = SequenceTokens(**held.job.key._asdict(), index=index, token_ids=tokens)
        return TokenBatch(worker_id=self.ref.worker_id, generation=self.ref.generation, items=[item])

    def _say_scores(self, held: Held, first: int) -> None:
        """One message for each token of a prompt that is scored: half of them would be a gap."""
        job = held.job
        if job.sampling.prompt_logprobs is not None:
            about = self._about(job)
            for index, entry in list(enumerate(scores_of(job.prompt_token_ids), 1))[first - 1 :]:
                self._say(PromptLogprobs(**about, index=index, logprobs=[entry]))  # type: ignore[arg-type]

    def _resend(self, held: Held, message: ResendTokens) -> None:
        from_index = message.from_index
        if message.from_prompt_index is not None and held.tokens:
            self._say_scores(held, message.from_prompt_index)
        if held.next_index > from_index >= held.first_index:
            self._say(self._batch(held, from_index))
        if held.finish is not None:
            self._say(held.finish)

    # --- work

    def step(self, now_s: float) -> None:
        if self.crashed_s is not None:
            return
        for held in list(self.held.values()):
            if held.ended_s is not None and now_s - held.ended_s > KEPT_S:
                del self.held[held.job.key]
            elif held.state == "receiving":
                self._receive_kv(held, now_s)
            elif held.state in ("waiting", "running"):
                self._compute(held, now_s)
            elif held.state == "leased" and now_s - held.since_s > LEASE_S:
                del self.held[held.job.key]
        if now_s - self._last_roster_s >= 1.0:
            self._last_roster_s = now_s
            items = [
                RosterItem(**held.job.key._asdict(), state=held.state, next_index=held.next_index)
                for held in self.held.values()
            ]
            self._say(Roster(worker_id=self.ref.worker_id, generation=self.ref.generation, items=items))

    def _receive_kv(self, held: Held, now_s: float) -> None:
        job = held.job
        assert isinstance(job, DecodeJob)
        source = self.world.workers.get(WorkerRef(str(job.prefill_worker_id), str(job.prefill_generation)))
        theirs = source.held.get(job.key) if source is not None and source.crashed_s is None else None
        if theirs is not None and theirs.state == "leased":
            held.tokens, held.state = theirs.tokens[:1], "ready"
            assert source is not None
            del source.held[job.key]
            held.state = "running"
            self._publish(held, held.first_index, now_s)
        elif source is not None and source.crashed_s is None and theirs is None:
            self._fail(job, "handoff_failed")
        elif now_s - held.since_s > HANDOFF_TIMEOUT_S:
            self._fail(job, "handoff_timeout")

    def _compute(self, held: Held, now_s: float) -> None:
        if held.state == "waiting":
            held.state, held.since_s = "running", now_s
            if self.is_prefill:
                self.world.num_prefills += 1
                about = self._about(held.job)
                self._say(Started(**about, num_cached_tokens=0, schedule_s=0.1))  # type: ignore[arg-type]
            return
        if not held.tokens:
            self._say_scores(held, 1)
        history = held.job.prompt_token_ids + held.tokens
        held.tokens.append(self.world.sample(history, held.job.key))
        self._publish(held, held.next_index - 1, now_s)

    def _publish(self, held: Held, index: int, now_s: float) -> None:
        self._say(self._batch(held, index))
        is_stop = held.tokens[-1] == self.stop_token
        if is_stop or held.next_index >= held.job.sampling.max_tokens:
            held.finish = Finished(
                **self._about(held.job),  # type: ignore[arg-type]
                finish_reason="stop" if is_stop else "length",
                num_output_tokens=held.next_index,
                stop_token_id=held.tokens[-1] if is_stop else None,
            )
            held.state, held.ended_s = "finished", now_s
            self._say(held.finish)
        elif self.is_prefill:
            held.state, held.since_s = "leased", now_s
