"""Every message that crosses the bus. msgpack structs, readable as JSON, tolerant of unknown fields.

A stream entry carries a *list* of messages (field `m`): all that one step has to say to one reader is
one entry. The unit of the protocol is the sequence (request_id, choice); each dispatch of it is an
attempt with an unguessable nonce. Any message may be lost, doubled or late: receivers match
(request_id, choice, attempt, nonce) and drop what they do not know. No absolute time crosses hosts:
deadlines travel as `remaining_s`.

What flows where:

    gateway → prefill   PrefillJob, Cancel, ResendTokens
    gateway → decode    DecodeJob, Cancel, ResendTokens
    decode → prefill    KvWant, KvRelease, LeaseRenewal
    prefill → decode    KvReady, KvFailed
    prefill → gateway   Started, PromptLogprobs, TokenBatch, Finished, Failed, Roster
    decode → gateway    PromptLogprobs, TokenBatch, Finished, Failed, Roster

P and D below are the prefill and the decode worker of a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdserve.errors import BusError
from pdserve.ids import Fingerprint, GatewayId, GenerationId, KvSignature, Nonce, RequestId, WorkerId
from pdserve.reasons import CancelReason, FailReason, FinishReason, KvFailReason, SequenceState
from pdserve.registration import WorkerRef
from pdserve.sampling_params import SamplingParams

SCHEMA_VERSION = 1
"""Raised when a message changes in a way that an older reader would misread."""


class SequenceKey(NamedTuple):
    """One sequence of one request: the unit of the protocol."""

    request_id: RequestId
    choice: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}"


class AttemptKey(NamedTuple):
    """One dispatch of a sequence. Two attempts never share a nonce."""

    request_id: RequestId
    choice: int
    attempt: int
    nonce: Nonce

    @property
    def sequence(self) -> SequenceKey:
        """The sequence that this is an attempt of."""
        return SequenceKey(self.request_id, self.choice)

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}#{self.attempt}"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True, omit_defaults=True):
    """Base of all messages."""

    version: int = SCHEMA_VERSION


class AttemptMessage(Message, frozen=True, kw_only=True, tag=True):
    """Base of all messages about one attempt."""

    request_id: RequestId
    choice: int
    attempt: int
    nonce: Nonce

    @property
    def key(self) -> AttemptKey:
        """The attempt that this message is about."""
        return AttemptKey(self.request_id, self.choice, self.attempt, self.nonce)

    @property
    def sequence(self) -> SequenceKey:
        """The sequence that this message is about."""
        return SequenceKey(self.request_id, self.choice)


class WorkerMessage(Message, frozen=True, kw_only=True, tag=True):
    """Base of what a worker says about several attempts at once."""

    worker_id: WorkerId
    generation: GenerationId

    @property
    def worker(self) -> WorkerRef:
        """The process that says it."""
        return WorkerRef(self.worker_id, self.generation)


class WorkerAttemptMessage(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """Base of what a worker says about one attempt."""

    worker_id: WorkerId
    generation: GenerationId

    @property
    def worker(self) -> WorkerRef:
        """The process that says it."""
        return WorkerRef(self.worker_id, self.generation)


# --- gateway → workers


class PrefillJob(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """Compute this prompt, publish token 0, keep the KV blocks under a lease for a decode worker."""

    gateway_id: GatewayId
    fingerprint: Fingerprint
    """Model fingerprint; a worker of another model refuses."""
    prompt_token_ids: list[int]
    """Original prompt plus the tokens that earlier attempts emitted."""
    num_original_prompt_tokens: int
    """How many of `prompt_token_ids` the client sent; output index, penalties and limits count from here."""
    sampling: SamplingParams
    remaining_s: float
    priority: int = 0
    """Jobs with a lower number go sooner."""
    cache_salt: str = ""
    """Prefix-cache isolation between tenants."""
    will_decode: bool = True
    """False when token 0 is also the last one (one output token left): blocks need no lease."""


class DecodeJob(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """Fetch the KV blocks of this prompt from P and decode it; without P, prefill locally."""

    gateway_id: GatewayId
    fingerprint: Fingerprint
    prompt_token_ids: list[int]
    num_original_prompt_tokens: int
    sampling: SamplingParams
    remaining_s: float
    priority: int = 0
    cache_salt: str = ""
    prefill_worker_id: WorkerId | None = None
    """None: there is no hand-off, the decode worker computes the prompt and samples index 0 itself."""
    prefill_generation: GenerationId | None = None

    @property
    def prefill(self) -> WorkerRef | None:
        """The prefill worker process whose blocks are fetched; None without a hand-off."""
        if self.prefill_worker_id is None or self.prefill_generation is None:
            return None
        return WorkerRef(self.prefill_worker_id, self.prefill_generation)


class Cancel(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """Stop this attempt in whatever state it is. Harmless when unknown, also before its job arrives."""

    reason: CancelReason = CancelReason.CLIENT


class ResendTokens(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """Send the tokens of this attempt again, from output index `from_index` on."""

    gateway_id: GatewayId
    from_index: int
    from_prompt_index: int | None = None
    """Send the prompt's log-probabilities again, too, from this token of it on; None: none are missing."""


# --- hand-off: D ↔ P


class KvWant(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """D has reserved its blocks and wants P's. Answered with KvReady for all finished chunks, then each new one."""

    kv_signature: KvSignature
    backend: str
    """The backend that D chose for the pair: nixl or tcp."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probability of a sampled or given token and of the best alternatives, most likely first."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0
    """Tokens at least as likely as this one, itself included: 1 is the most likely one. 0: not counted."""


class KvReady(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """These blocks are complete on P's device and leased. The last one carries token 0."""

    first_block_index: int
    """Index into the sequence's block table of the first block below."""
    block_ids: list[int]
    """P's block ids, never addresses."""
    digests: list[bytes]
    """16 bytes per block; empty with INTEGRITY=off."""
    chain_hash: bytes = b""
    """Prefix-cache chain hash of the last *full* block up to here (empty before the first full block)."""
    is_last: bool = False
    token0: int | None = None
    token0_logprobs: TokenLogprobs | None = None


class KvFailed(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """P cannot serve this hand-off."""

    reason: KvFailReason
    detail: str = ""


class KvRelease(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """D needs P's blocks no more: no READ of them is in flight."""

    is_complete: bool = True
    """True: everything was read and verified, P may free the blocks. False: given up; another D may still come."""


class LeaseItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What D has of one hand-off."""

    request_id: RequestId
    choice: int
    attempt: int
    nonce: Nonce
    num_announced_blocks: int
    """Leading blocks of the sequence of which D knows P's id."""
    has_token0: bool

    @property
    def key(self) -> AttemptKey:
        """The attempt of this hand-off."""
        return AttemptKey(self.request_id, self.choice, self.attempt, self.nonce)


class LeaseRenewal(WorkerMessage, frozen=True, kw_only=True, tag=True):
    """D to one P, each heartbeat: every hand-off held. P renews, re-announces what is missing, or says unknown."""

    items: list[LeaseItem]


# --- workers → gateway


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Durations measured by one worker on its own clock, in seconds."""

    schedule_s: float = 0.0
    """The wait in the worker before its first chunk started."""
    prefill_s: float = 0.0
    """The time from the first chunk's start to token 0."""
    transfer_s: float = 0.0
    """The time from the first READ posted to the last READ verified."""
    transfer_bytes: int = 0


class Started(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """P has begun with this prompt: all its blocks are reserved. The gateway now picks a decode worker."""

    num_cached_tokens: int
    schedule_s: float


class PromptLogprobs(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """Log-probabilities of consecutive prompt tokens, each given those before it. Idempotent by index.

    All of a prompt's are sent before its first output token, in pieces; only when `sampling.prompt_logprobs` asks.
    """

    index: int
    """Place in the prompt of the first of these tokens; 1 is the first token that has one."""
    logprobs: list[TokenLogprobs]


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one attempt, consecutive from `index`. Idempotent by (request_id, choice, attempt, index)."""

    request_id: RequestId
    choice: int
    attempt: int
    nonce: Nonce
    index: int
    """Output index of the first token, counted from the original prompt: 0 is the first token the client ever sees."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One per token when the client asked for them, else None."""
    timing: Timing | None = None
    """With the first tokens that a worker sends: what P measured (token 0), what D measured (its first own token)."""

    @property
    def key(self) -> AttemptKey:
        """The attempt of these tokens."""
        return AttemptKey(self.request_id, self.choice, self.attempt, self.nonce)


class TokenBatch(WorkerMessage, frozen=True, kw_only=True, tag=True):
    """All that one step (or one finished prefill) produced for one gateway."""

    items: list[SequenceTokens]


class Finished(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """The sequence is complete. Travels in the same stream entry as its last tokens."""

    finish_reason: FinishReason
    num_output_tokens: int
    """Counted from the original prompt; a receiver that has fewer asks for the rest (ResendTokens)."""
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended it: always the last output token."""


class Failed(WorkerAttemptMessage, frozen=True, kw_only=True, tag=True):
    """The attempt ended on this worker without finishing."""

    reason: FailReason
    retryable: bool
    detail: str = ""
    was_in_step: bool = False
    """True when the failure happened while this sequence was part of the running step."""


class RosterItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt that a worker holds."""

    request_id: RequestId
    choice: int
    attempt: int
    nonce: Nonce
    state: SequenceState
    next_index: int
    """Output index of the next token; everything below can be asked for again."""

    @property
    def key(self) -> AttemptKey:
        """The attempt of this item."""
        return AttemptKey(self.request_id, self.choice, self.attempt, self.nonce)


class Roster(WorkerMessage, frozen=True, kw_only=True, tag=True):
    """With each heartbeat: all attempts of one gateway that a worker holds, finished ones for three heartbeats."""

    items: list[RosterItem]


AnyMessage = (
    PrefillJob
    | DecodeJob
    | Cancel
    | ResendTokens
    | KvWant
    | KvReady
    | KvFailed
    | KvRelease
    | LeaseRenewal
    | Started
    | PromptLogprobs
    | TokenBatch
    | Finished
    | Failed
    | Roster
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyMessage])


def encode(messages: list[Message]) -> bytes:
    """The payload of one stream entry."""
    return _encoder.encode(messages)


def decode(payload: bytes) -> list[AnyMessage]:
    """The messages of one stream entry.

    Raises:
        BusError: not msgpack, an unknown type, a missing field, or a schema version from the future.
    """
    try:
        messages = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise BusError(f"unreadable bus entry of {len(payload)} bytes: {error}") from error
    for message in messages:
        if message.version > SCHEMA_VERSION:
            raise BusError(f"{type(message).__name__} has schema version {message.version}, known is {SCHEMA_VERSION}")
    return messages
