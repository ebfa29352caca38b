"""Bytes of tokens: their own, but for the blanks that a decoder drops where a text begins."""

from __future__ import annotations

import pytest

from pdserve.gateway.generation.answer import TokenEntry
from pdserve.gateway.openai.logprobs import chat_logprobs
from pdserve.messages import TokenLogprobs


@pytest.mark.parametrize(
    ("own", "text", "is_hidden", "shown"),
    [
        (b" Hello", "Hello", False, b"Hello"),
        (b" Hello", " Hello", False, b" Hello"),
        (b"   ", "", False, b""),
        (b"\xe6", "", False, b"\xe6"),
        (b"\xb2\xb3", "河", False, b"\xb2\xb3"),
        (b"a\xe6", "a\ufffd", False, b"a\xe6"),
        (b"<|im_end|>", "", True, b""),
    ],
)
def test_bytes_join_to_the_text(own: bytes, text: str, is_hidden: bool, shown: bytes) -> None:
    entry = TokenEntry(5, text, is_hidden, TokenLogprobs(logprob=-1.0, top_token_ids=[], top_logprobs=[]))
    (content,) = chat_logprobs([entry], lambda _: own)["content"]
    assert bytes(content["bytes"]) == shown
