"""Bad words and allowed ids through a whole service: as transformers has them, in chunks, and dispatched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.local.service import PrivateService

SERVICE: dict[str, Any] = {
    "num": {"prefill": 2, "decode": 2},
    "settings": {"DETERMINISTIC": cpu_ops.why_unavailable() is None, "NUM_BLOCKS": 512, "MAX_NUM_BATCHED_TOKENS": 64},
    "faults": {},
}
PROMPT = list(range(30, 180))
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _healthy(service: PrivateService) -> Iterator[None]:
    """Every test leaves a service that runs again, without faults, and holds nothing."""
    yield
    for process in service.processes:
        if process.pid is None:
            service.restart(process.role, process.index, wait_s=None)
    service.wait_ready(60)
    for process in service.processes:
        service.put_faults(process.role, {}, process.index)
    service.wait_until_nothing_is_held(20)


@pytest.fixture(scope="module")
def generate(tiny_model_dir: Path) -> Callable[..., list[int]]:
    """transformers' greedy output, without any end."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()

    @torch.no_grad()
    def generated(**constraints: Any) -> list[int]:
        prompt = torch.tensor([PROMPT])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
            **constraints,
        )
        ids: list[int] = output[0, len(PROMPT) :].tolist()
        return ids

    return generated


@pytest.fixture(scope="module")
def words(tiny_model_dir: Path, generate: Callable[..., list[int]]) -> list[str]:
    """Texts of pairs and single tokens that the output would have, each of which encodes to itself."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    free, found = generate(), []
    for length in (1, 2, 3):
        for start in range(NUM_TOKENS - length):
            ids = free[start : start + length]
            text = tokenizer.decode(ids)
            if text == text.strip() and text.isprintable() and tokenizer.encode(text) == ids:
                found.append(text)
    assert found, "the tiny model writes no token by itself"
    return found[:12]


def forbidden(tiny_model_dir: Path, words: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    plain = [tokenizer.encode(word) for word in words]
    spaced = [tokenizer.encode(f" {word}") for word in words]
    pairs = zip(plain, spaced, strict=True)
    return plain + [after for alone, after in pairs if len(after) == len(alone) and after[0] != alone[0]]


def slow_down(service: PrivateService, role: str, **faults: float) -> None:
    for process in service.workers:
        if process.role == role:
            service.put_faults(role, faults, process.index)


@pytest.mark.parametrize("is_killed", [False, True])
def test_bad_words_are_those_of_transformers_also_when_another_worker_goes_on(
    service: PrivateService,
    open_stream: Callable[..., Any],
    holder_of: Callable[[str], int | None],
    generate: Callable[..., list[int]],
    words: list[str],
    tiny_model_dir: Path,
    is_killed: bool,
) -> None:
    expected = generate(bad_words_ids=forbidden(tiny_model_dir, words))
    assert expected != generate()
    if is_killed:
        slow_down(service, "decode", step_delay_s=0.05)
    with open_stream(PROMPT, NUM_TOKENS, ignore_eos=True, bad_words=words) as stream:
        if is_killed:
            stream.read(8)
            service.kill("decode", holder_of("decode"))
        got = stream.read()
    assert stream.error is None, stream.error
    assert got == expected


def test_allowed_ids_are_those_of_transformers(
    open_stream: Callable[..., Any], generate: Callable[..., list[int]]
) -> None:
    allowed = list(range(40, 90, 3))
    with open_stream(PROMPT, NUM_TOKENS, ignore_eos=True, allowed_token_ids=allowed) as stream:
        got = stream.read()
    assert got == generate(prefix_allowed_tokens_fn=lambda batch, ids: allowed)


def test_seeded_sampling_stays_within_the_allowed_ids(
    service: PrivateService, open_stream: Callable[..., Any], holder_of: Callable[[str], int | None]
) -> None:
    allowed = [41, 47, 53, 61]
    body = {"ignore_eos": True, "allowed_token_ids": allowed, "temperature": 1.5, "seed": 3}
    with open_stream(PROMPT, NUM_TOKENS, **body) as stream:
        whole = list(stream.read())
    slow_down(service, "decode", step_delay_s=0.05)
    with open_stream(PROMPT, NUM_TOKENS, **body) as stream:
        stream.read(8)
        service.kill("decode", holder_of("decode"))
        got = stream.read()
    assert got == whole
    assert set(got) <= set(allowed)
    assert len(set(got)) > 1


def test_a_cut_prompt_is_answered_as_its_end_is(
    service: PrivateService, open_stream: Callable[..., Any], http: httpx.Client
) -> None:
    with open_stream(PROMPT, 8, truncate_prompt_tokens=70) as cut, open_stream(PROMPT[-70:], 8) as whole:
        assert cut.read() == whole.read()
