"""When a sequence ends. A pure rule on a sequence whose newest token was just appended."""

from __future__ import annotations

from pdserve.engine.sampling.logit_filters import stop_ids
from pdserve.engine.sequence import Sequence
from pdserve.reasons import FinishReason


def check_stop(sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> None:
    """Set `finish_reason` (and `stop_token_id`) when the newest token is the last one.

    All counts are from the original prompt, so that an attempt that continues another ends where the first would.
    """
    newest = sequence.output_token_ids[-1]
    num_output_tokens = sequence.next_output_index
    if num_output_tokens > sequence.sampling.min_tokens and newest in stop_ids(sequence, eos_token_ids):
        sequence.finish_reason, sequence.stop_token_id = FinishReason.STOP, newest
    elif num_output_tokens >= sequence.sampling.max_tokens or sequence.num_tokens >= max_model_len:
        sequence.finish_reason = FinishReason.LENGTH
