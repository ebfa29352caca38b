from __future__ import annotations

import pytest

from pdserve.models.tiny_tokenizer import build_tokenizer
from pdserve.verify.prompts import KINDS, chat_prompts, lengths, token_prompts


@pytest.mark.parametrize("num", [32, 48, 180, 200])
@pytest.mark.parametrize("longest", [600, 1500])
def test_lengths_go_through_every_residue_from_one_token_to_the_longest(num: int, longest: int) -> None:
    result = lengths(num, longest, 16)
    assert len(result) == num
    assert {length % 16 for length in result} == set(range(16))
    assert min(result) == 1
    assert longest - 32 <= max(result) <= longest


@pytest.mark.parametrize("num", [1, 2, 5])
def test_few_prompts_and_short_contexts_are_possible(num: int) -> None:
    assert all(1 <= length <= 20 for length in lengths(num, 20, 16))


def test_prompts_have_their_length_and_share_no_block() -> None:
    tokenizer = build_tokenizer()
    prompts = token_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 40, 300, 16)
    assert [len(p.token_ids) for p in prompts] == lengths(40, 300, 16)
    blocks = [p.token_ids[:16] for p in prompts if len(p.token_ids) >= 16]
    assert len(set(blocks)) == len(blocks)
    assert all(any(p.name.startswith(kind) for p in prompts) for kind in KINDS)


def test_chats_are_of_all_kinds_and_repeatable() -> None:
    def template(message: str) -> list[int]:
        return [1, *message.encode()]

    prompts = chat_prompts(template, 6)
    assert prompts == chat_prompts(template, 6)
    assert all(p.message and p.token_ids[1:] == tuple(p.message.encode()) for p in prompts)
