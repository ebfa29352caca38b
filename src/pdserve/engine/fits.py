"""Whether a sequence can be served by this engine at all. A pure rule; whether it fits *now* is the scheduler's."""

from __future__ import annotations

from pdserve.engine.sequence import Sequence
from pdserve.errors import InvalidRequestError


def check_fits_ever(sequence: Sequence, *, vocab_size: int, max_model_len: int, num_kv_tokens: int) -> None:
    """Refuse what could never finish, even alone.

    A sequence that passes can finish when it has the pool to itself: the scheduler's progress rests on that.

    Args:
        sequence: a new one.
        vocab_size: token ids lie in [0, vocab_size).
        max_model_len: context length, tokens.
        num_kv_tokens: tokens that the whole block pool holds.

    Raises:
        InvalidRequestError: with the numbers.
    """
    if not sequence.prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens")
    if min(sequence.prompt_token_ids) < 0 or max(sequence.prompt_token_ids) >= vocab_size:
        raise InvalidRequestError(f"token ids must lie in [0, {vocab_size})")
    num_prompt = sequence.num_prompt_tokens
    num_wanted = max(0, sequence.sampling.max_tokens - sequence.first_output_index)
    num_output = min(1, num_wanted) if sequence.is_prefill_only else num_wanted
    num_stored = num_prompt + max(0, num_output - 1)  # the last token is not computed, so it needs no KV
    if num_prompt + num_output > max_model_len or num_stored > num_kv_tokens:
        raise InvalidRequestError(
            f"{num_prompt} prompt tokens and {num_wanted} output tokens exceed what fits: "
            f"context length {max_model_len}, KV cache {num_kv_tokens} tokens"
        )
