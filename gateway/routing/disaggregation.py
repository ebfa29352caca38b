"""Who computes a prompt: a prefill worker, or the decode worker that will go on with it. Pure.

Exactly one of the two: an attempt is sent to a prefill worker, or to a decode worker without one, never to both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.gateway.generation.request import GenerationRequest

Mode = Literal["auto", "always", "never"]
"""always: a prefill worker computes every prompt; never: no prefill worker is needed; auto: short prompts alone are
computed where they are decoded."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The settings DISAGGREGATION and MIN_REMOTE_TOKENS."""

    mode: Mode = "auto"
    min_remote_tokens: int = 0
    """With auto: prompts with fewer tokens cost less to compute than to hand over. 0: none does."""

    @property
    def needs_pairs(self) -> bool:
        """Whether some prompt may need a prefill worker."""
        return self.mode != "never"

    def is_local(self, request: GenerationRequest) -> bool:
        """Whether the decode worker computes this prompt itself. One output token alone is never decoded."""
        if self.mode != "auto":
            return self.mode == "never"
        is_short = len(request.prompt_token_ids) < self.min_remote_tokens
        return is_short and request.sampling.max_tokens > 1 and request.pinned_prefill is None
