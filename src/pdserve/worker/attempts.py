"""What a worker holds for its gateways: attempts, the tokens they produced, and the memory of ended ones.

Any message may be lost, doubled or late. So an attempt's tokens stay here for three heartbeats after its
end and can be asked for again; ended and cancelled attempts leave tombstones, so that a doubled job, or a
Cancel that overtook its job, is harmless; and a higher attempt of a sequence ends the lower ones.

Sees no clock: times are arguments, in monotonic seconds. Never touches the engine or a transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.engine.engine import StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.ids import GatewayId
from pdserve.messages import (
    AttemptKey,
    Failed,
    Finished,
    PromptLogprobs,
    ResendTokens,
    Roster,
    RosterItem,
    SequenceKey,
    SequenceTokens,
    Started,
    Timing,
    TokenBatch,
    TokenLogprobs,
)
from pdserve.reasons import FailReason, FinishReason, SequenceState
from pdserve.worker.admission import Refusal
from pdserve.worker.sender import Sender

PROMPT_LOGPROBS_PER_MESSAGE = 256
"""With 20 alternatives a token's log-probabilities take about 300 bytes."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt on this worker; its `token_ids` start at output index `first_index`."""

    sequence: Sequence
    gateway_id: GatewayId
    received_s: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_sent: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each prompt token from the second one on, as far as they are computed; empty unless asked for."""
    num_prompt_logprobs_sent: int = 0
    timing: Timing | None = None
    """Sent with the next tokens."""
    finished: Finished | None = None
    is_finish_sent: bool = False
    ended_s: float | None = None

    @property
    def key(self) -> AttemptKey:
        """The key of this attempt: no other has its nonce."""
        return self.sequence.key

    @property
    def first_index(self) -> int:
        """Output index of the first token of this attempt."""
        return self.sequence.first_output_index

    @property
    def first_token(self) -> tuple[int | None, TokenLogprobs | None]:
        """The attempt's first output token and its logprobs, as far as known."""
        return (
            self.token_ids[0] if self.token_ids else None,
            self.logprobs[0] if self.logprobs else None,
        )

    @property
    def has_unsent(self) -> bool:
        """Whether log-probabilities of the prompt, tokens, or the finish still have to be sent."""
        is_behind = self.num_sent < len(self.token_ids) or self.num_prompt_logprobs_sent < len(self.prompt_logprobs)
        return is_behind or (self.finished is not None and not self.is_finish_sent)

    @property
    def schedule_s(self) -> float:
        """Seconds from arrival here to the start of the computation; 0 before that."""
        admitted_s = self.sequence.admitted_s
        return 0.0 if admitted_s is None else max(0.0, admitted_s - self.sequence.arrival_s)

    @property
    def is_computing_prompt(self) -> bool:
        """Whether this worker computes the prompt now; its `sequence.admitted_s` says since when."""
        sequence = self.sequence
        is_admitted = sequence.state is SequenceState.RUNNING and sequence.admitted_s is not None
        return is_admitted and sequence.num_computed_tokens < sequence.num_prompt_tokens

    @property
    def next_index(self) -> int:
        """Output index of the next token."""
        return self.first_index + len(self.token_ids)

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Append the next token."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def tokens_from(self, index: int) -> SequenceTokens:
        """All tokens from output index `index` on (from the first, when that is later)."""
        start = max(0, index - self.first_index)
        return SequenceTokens(
            request_id=self.key.request_id,
            choice=self.key.choice,
            attempt=self.key.attempt,
            nonce=self.key.nonce,
            index=self.first_index + start,
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:] or None,
            timing=self.timing,
        )


class Attempts:
    """All attempts of one worker.

    Args:
        sender: tells the gateways; while it holds a gateway back, tokens wait here until that gateway has read.
        keep_s: how long ended attempts can be asked for their tokens (three heartbeats).
    """

    def __init__(self, sender: Sender, *, keep_s: float) -> None:
        self._sender = sender
        self._keep_s = keep_s
        self._active: dict[SequenceKey, Attempt] = {}
        self._ended: dict[AttemptKey, Attempt] = {}
        self._tombstones: dict[AttemptKey, float] = {}

    # --- membership

    def is_new(self, key: AttemptKey) -> bool:
        """Whether a job with this key should be taken: not seen before, not cancelled, not overtaken."""
        if key in self._tombstones or key in self._ended:
            return False
        current = self._active.get(key.sequence)
        return current is None or current.key.attempt < key.attempt

    def older_than(self, key: AttemptKey) -> Attempt | None:
        """The active attempt that a job with this key supersedes."""
        current = self._active.get(key.sequence)
        return current if current is not None and current.key.attempt < key.attempt else None

    def open(self, sequence: Sequence, gateway_id: GatewayId, now_s: float) -> Attempt:
        """Start to hold an attempt."""
        assert sequence.key.sequence not in self._active, f"{sequence.key} is active already"
        attempt = self._active[sequence.key.sequence] = Attempt(sequence, gateway_id, now_s)
        return attempt

    def get(self, key: AttemptKey) -> Attempt | None:
        """The active attempt with exactly this key."""
        attempt = self._active.get(key.sequence)
        return attempt if attempt is not None and attempt.key == key else None

    def active(self) -> list[Attempt]:
        """Attempts that have not ended here, oldest first."""
        return list(self._active.values())

    def bury(self, key: AttemptKey, until_s: float) -> None:
        """Remember that this attempt is over (or was cancelled before it came) until its deadline."""
        self._tombstones[key] = until_s

    def end(self, attempt: Attempt, now_s: float, *, keeps_tokens: bool) -> None:
        """The attempt is over on this worker; its key stays until its deadline, its tokens for a while if wanted."""
        if self._active.get(attempt.key.sequence) is attempt:
            del self._active[attempt.key.sequence]
        attempt.ended_s = now_s
        if keeps_tokens:
            self._ended[attempt.key] = attempt
        self.bury(attempt.key, max(attempt.sequence.deadline_s, now_s + self._keep_s))

    def is_buried(self, key: AttemptKey) -> bool:
        """Whether this attempt is known to be over."""
        return key in self._tombstones

    def prune(self, now_s: float) -> None:
        """Forget ended attempts and tombstones whose time has passed."""
        for key in [key for key, attempt in self._ended.items() if self._is_forgettable(attempt, now_s)]:
            del self._ended[key]
        for key in [k for k, until_s in self._tombstones.items() if until_s < now_s]:
            del self._tombstones[key]

    def _is_forgettable(self, attempt: Attempt, now_s: float) -> bool:
        assert attempt.ended_s is not None, attempt.key
        is_told = not attempt.has_unsent or attempt.sequence.deadline_s < now_s
        return is_told and attempt.ended_s + self._keep_s < now_s

    def absorb(self, output: StepOutput) -> list[Attempt]:
        """Take a step's log-probabilities, tokens and finishes; returns the attempts that have something to publish."""
        touched: dict[AttemptKey, Attempt] = {}
        for sequence, prompt_logprobs in output.prompt_logprobs:
            if (attempt := self.get(sequence.key)) is not None:
                attempt.prompt_logprobs += prompt_logprobs
                touched[attempt.key] = attempt
        for sequence, token_id, logprobs in output.tokens:
            if (attempt := self.get(sequence.key)) is not None:
                attempt.add_token(token_id, logprobs)
                touched[attempt.key] = attempt
        for sequence in output.finished:
            if (attempt := self.get(sequence.key)) is not None:
                assert sequence.finish_reason is not None, sequence.key
                self.finish(attempt, sequence.finish_reason, sequence.stop_token_id)
                touched[attempt.key] = attempt
        return list(touched.values())

    # --- messages to gateways

    def start(self, attempt: Attempt) -> None:
        """Tell the gateway that the prompt's blocks are reserved and its computation begins."""
        started = Started(
            **attempt.key._asdict(),
            **self._sender.ref._asdict(),
            num_cached_tokens=attempt.sequence.num_cached_tokens,
            schedule_s=attempt.schedule_s,
        )
        self._sender.to_gateway(attempt.gateway_id, started)

    def publish(self, touched: Iterable[Attempt]) -> None:
        """Send all that is unsent of these attempts: what prompts score, one TokenBatch per gateway, then Finished."""
        by_gateway: dict[GatewayId, list[Attempt]] = {}
        for attempt in touched:
            by_gateway.setdefault(attempt.gateway_id, []).append(attempt)
        ref = self._sender.ref
        for gateway_id, attempts in by_gateway.items():
            if self._sender.is_held_back(gateway_id):
                continue
            for attempt in attempts:
                self._send_prompt_logprobs(attempt, gateway_id, attempt.num_prompt_logprobs_sent)
            items = [a.tokens_from(a.first_index + a.num_sent) for a in attempts if a.num_sent < len(a.token_ids)]
            if items:
                self._sender.to_gateway(gateway_id, TokenBatch(**ref._asdict(), items=items))
            for attempt in attempts:
                attempt.num_sent = len(attempt.token_ids)
                attempt.timing = None
                if attempt.finished is not None and not attempt.is_finish_sent:
                    attempt.is_finish_sent = True
                    self._sender.to_gateway(gateway_id, attempt.finished)

    def _send_prompt_logprobs(self, attempt: Attempt, gateway_id: GatewayId, start: int) -> None:
        """Send those from `start` on, in pieces."""
        attempt.num_prompt_logprobs_sent = len(attempt.prompt_logprobs)
        for first in range(start, len(attempt.prompt_logprobs), PROMPT_LOGPROBS_PER_MESSAGE):
            piece = PromptLogprobs(
                **attempt.key._asdict(),
                **self._sender.ref._asdict(),
                index=1 + first,
                logprobs=attempt.prompt_logprobs[first : first + PROMPT_LOGPROBS_PER_MESSAGE],
            )
            self._sender.to_gateway(gateway_id, piece)

    def publish_held_back(self) -> None:
        """Send what waited because a gateway's stream was full."""
        held = (*self._active.values(), *self._ended.values())
        self.publish(attempt for attempt in held if attempt.has_unsent)

    def finish(self, attempt: Attempt, finish_reason: FinishReason, stop_token_id: int | None) -> None:
        """Note that the sequence is complete; `publish` says so."""
        attempt.finished = Finished(
            **attempt.key._asdict(),
            **self._sender.ref._asdict(),
            finish_reason=finish_reason,
            num_output_tokens=attempt.next_index,
            stop_token_id=stop_token_id,
        )

    def fail(
        self,
        key: AttemptKey,
        gateway_id: GatewayId,
        reason: FailReason,
        *,
        retryable: bool,
        detail: str = "",
        in_step: bool = False,
    ) -> None:
        """Tell the gateway that this attempt ended here without finishing."""
        self._sender.to_gateway(
            gateway_id,
            Failed(
                **key._asdict(),
                **self._sender.ref._asdict(),
                reason=reason,
                retryable=retryable,
                detail=detail,
                was_in_step=in_step,
            ),
        )

    def refuse(self, key: AttemptKey, gateway_id: GatewayId, refusal: Refusal) -> None:
        """Tell the gateway that a job was not taken."""
        self.fail(key, gateway_id, refusal.reason, retryable=refusal.retryable, detail=refusal.detail)

    def resend(self, message: ResendTokens) -> None:
        """Answer a gateway that missed tokens. Unknown attempts are silent: the next roster tells it."""
        attempt = self.get(message.key) or self._ended.get(message.key)
        if attempt is None:
            return
        if message.from_prompt_index is not None:
            self._send_prompt_logprobs(attempt, message.gateway_id, max(0, message.from_prompt_index - 1))
        if message.from_index < attempt.next_index:
            tokens = attempt.tokens_from(message.from_index)
            batch = TokenBatch(**self._sender.ref._asdict(), items=[tokens])
            self._sender.to_gateway(message.gateway_id, batch)
        if attempt.finished is not None:
            self._sender.to_gateway(message.gateway_id, attempt.finished)

    def roster(self, gateway_id: GatewayId) -> Roster:
        """Everything held for one gateway, finished attempts included while their tokens are kept."""
        held = [*self._active.values(), *(attempt for attempt in self._ended.values() if attempt.finished is not None)]
        items = [_roster_item(attempt) for attempt in held if attempt.gateway_id == gateway_id]
        return Roster(**self._sender.ref._asdict(), items=items)

    def send_rosters(self, gateway_ids: Iterable[GatewayId]) -> None:
        """Tell these gateways, and all that have active attempts here, what is held for them."""
        for gateway_id in {*gateway_ids, *(attempt.gateway_id for attempt in self._active.values())}:
            self._sender.to_gateway(gateway_id, self.roster(gateway_id))


def _roster_item(attempt: Attempt) -> RosterItem:
    state = attempt.sequence.state if attempt.finished is None else SequenceState.FINISHED
    return RosterItem(**attempt.key._asdict(), state=state, next_index=attempt.next_index)
