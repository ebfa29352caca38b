"""A sequence: the engine's state of one request's one choice. Pure data; the engine and its scheduler change it.

Token counters: `num_tokens` = prompt + output; `num_computed_tokens` = leading tokens
whose KV is in the block table; `num_cached_tokens` = the part of the prompt that a prefix cache supplied.
A sequence decodes when exactly one token is not computed yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.messages import AttemptKey
from pdserve.reasons import FinishReason, SequenceState
from pdserve.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of one attempt. Compared by identity."""

    key: AttemptKey
    prompt_token_ids: list[int]
    """The prompt as dispatched: the original one plus what earlier attempts emitted."""
    num_original_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    """A sequence with a lower number goes sooner; ageing raises it (scheduler)."""
    cache_salt: str = ""
    arrival_s: float = 0.0
    """When it came, on the local monotonic clock."""
    deadline_s: float = float("inf")
    """When it is too late, on the local monotonic clock."""
    is_prefill_only: bool = False
    """Prefill role: reserve the whole prompt at admission, stop after token 0."""
    is_cacheable: bool = True
    """Whether its full blocks may enter the prefix cache; false when received KV could not be proven to be its own."""

    # --- set by the engine
    state: SequenceState = SequenceState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens sampled (or received, for token 0 of a hand-off) in this attempt."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the full blocks of the tokens, extended lazily (prefix cache)."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    """Tokens that the current step computes."""
    num_scored_tokens: int = 1
    """Leading tokens of the prompt whose log-probabilities are told, when they are wanted; the first one has none."""
    num_preemptions: int = 0
    admitted_s: float | None = None
    """When it last left the waiting queue."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt as dispatched."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be told; the prompt is then the original one."""
        return self.sampling.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that a prefix cache may supply: the logits of the others are wanted."""
        return (self.num_scored_tokens if self.is_scored else self.num_tokens) - 1

    @property
    def first_output_index(self) -> int:
        """Output index (from the original prompt) of this attempt's first output token."""
        return self.num_prompt_tokens - self.num_original_prompt_tokens

    @property
    def next_output_index(self) -> int:
        """Output index, from the original prompt, of the next token to sample."""
        return self.first_output_index + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
