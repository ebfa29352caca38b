from __future__ import annotations

import pytest

from pdserve.bench.prompts import TextPrompts, TokenPrompts


def test_token_prompts_are_exact_and_differ_from_their_first_token_on() -> None:
    prompts = [TokenPrompts(range(100, 600), seed=3).make(40, 8) for _ in range(1)]
    source = TokenPrompts(range(100, 600), seed=3)
    prompts = [source.make(40, 8) for _ in range(500)]
    assert {len(p.content) for p in prompts} == {40}
    assert len({p.content[0] for p in prompts}) == 500
    assert all(100 <= token < 600 for p in prompts for token in p.content)


def test_a_small_vocabulary_still_gives_different_first_blocks() -> None:
    source = TokenPrompts(range(10), seed=0)
    prompts = [source.make(16, 1) for _ in range(1000)]
    assert len({tuple(p.content[:4]) for p in prompts}) == 1000


def test_equal_seeds_make_equal_prompts_and_others_do_not() -> None:
    def made(seed: int) -> list[object]:
        source = TokenPrompts(range(50), seed)
        return [source.make(20, 1).content for _ in range(5)]

    assert made(1) == made(1)
    assert made(1) != made(2)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 128, 1000])
async def test_text_prompts_are_fitted_to_the_servers_count(num_tokens: int) -> None:
    async def count(text: str) -> int:  # a template of five tokens, three letters a token
        return 5 + sum(-(-len(word) // 3) for word in text.split(" "))

    prompt = await TextPrompts(count, seed=0).make(num_tokens, 4)
    assert await count(prompt.text) == max(num_tokens, 7) == prompt.num_tokens


async def test_text_prompts_are_estimated_where_the_server_does_not_count() -> None:
    async def count(text: str) -> None:
        return None

    source = TextPrompts(count, seed=0)
    texts = [(await source.make(100, 4)).text for _ in range(20)]
    assert len({text.split()[0] for text in texts}) > 15
    assert all(30 <= len(text.split()) <= 100 for text in texts)
