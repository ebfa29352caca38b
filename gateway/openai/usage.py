"""The `usage` object. Pure."""

from __future__ import annotations

from typing import Any

from pdserve.gateway.generation.answer import Answer


def usage_of(answer: Answer | None, *, num_prompt_tokens: int, has_timing: bool) -> dict[str, Any]:
    """Tokens of one request; without an answer nothing was generated. Several prompts share the first one's timing."""
    num_output_tokens = answer.num_output_tokens if answer else 0
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens if answer else 0},
    }
    if has_timing and answer:
        usage["timing"] = answer.generations[0].waterfall.as_timing()
    return usage
