"""What one step of the engine did. Data alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.sequence import Sequence
from pdserve.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did."""

    started: list[Sequence] = field(default_factory=list)
    """Sequences that were admitted for the first time."""
    progressed: list[Sequence] = field(default_factory=list)
    """Sequences of whose prompt a chunk was computed, the last one included."""
    tokens: list[tuple[Sequence, int, TokenLogprobs | None]] = field(default_factory=list)
    """Sampled tokens, in order; a prefill-only sequence's token 0 too."""
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)
    """Log-probabilities of the next prompt tokens of each sequence that is scored."""
    finished: list[Sequence] = field(default_factory=list)
    """Sequences that ended: `finish_reason` is set, blocks are given back."""
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens that the step computed."""
    num_decode_tokens: int = 0
    """Those of them that decoding sequences computed."""
    num_stalled: int = 0
    """Decoding sequences that sat the step out for want of a block."""
    duration_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the step did nothing."""
        return not (self.num_tokens or self.tokens or self.preempted)
