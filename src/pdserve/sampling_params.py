"""How one sequence is sampled and when it stops. Travels inside jobs; validated once, by the gateway.

Workers trust these values: ranges are checked by the gateway (`gateway/openai/options.py`), and stop
*strings* stay in the gateway, which cancels the sequence when one appears.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's sampling parameters; defaults mean "off".

    `seed` is always set by the gateway (drawn when the client gave none), so that any worker samples
    the same token for (seed, choice, output index).
    """

    seed: int
    """64-bit; one per request, shared by its choices."""
    max_tokens: int
    """Output tokens, counted from the original prompt, at most; >= 1."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many output tokens."""
    temperature: float = 1.0
    """0 (or below 1e-5) is greedy, ties going to the lowest token id."""
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applies to tokens of prompt and output."""
    presence_penalty: float = 0.0
    """Applies to output tokens only, counted from the original prompt."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None = off; n >= 0 = the sampled token's log-probability and the n best alternatives."""

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is argmax."""
        return self.temperature < 1e-5
