"""How one sequence is sampled and when it stops. Travels inside jobs; validated once, by the gateway.

Workers trust these values: ranges are checked where the gateway reads a request (`gateway/openai/options.py`), and
stop *strings* stay in the gateway, which cancels the sequence when one appears.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's sampling parameters; defaults mean "off".

    `seed` is always set by the gateway (drawn when the client gave none), so that any worker samples
    the same token for (seed, choice, output index).
    """

    seed: int
    """One 64-bit number per request, shared by its choices."""
    max_tokens: int
    """At most this many output tokens, counted from the original prompt. 0: only the prompt's log-probabilities are
    wanted; the token behind it, which ends the sequence, is not shown."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many output tokens."""
    temperature: float = 1.0
    """Below 1e-5 sampling is greedy, and ties go to the lowest token id."""
    top_k: int = 0
    """Only this many most likely tokens may be drawn; 0 = all."""
    top_p: float = 1.0
    """Only the most likely tokens that have this probability together (after top_k) may be drawn; 1 = all."""
    min_p: float = 0.0
    """Only tokens with this share of the largest probability may be drawn; 0 = all."""
    repetition_penalty: float = 1.0
    """Above 1 it makes tokens of prompt and output less likely, below 1 more likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that the output has, counted from the original prompt."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that the output has it."""
    logit_bias: dict[int, float] = {}
    """Token id → what is added to its logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these token ids may be drawn; empty = all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never has: the last token of one is not drawn after the others."""
    ignore_eos: bool = False
    """Whether end-of-sequence tokens are tokens like any other."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence, beside the end-of-sequence tokens."""
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many best alternatives are told; None = of none."""
    prompt_logprobs: int | None = None
    """The same of every token of the prompt but the first; None = of none."""

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is argmax."""
        return self.temperature < 1e-5
