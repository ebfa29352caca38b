"""Every architecture that tiny models exist of: the disaggregated service equals transformers' generate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.local.service import PrivateService
from pdserve.models.tiny import ARCHITECTURES, make_model
from pdserve.verify.ask import Asking, ask_all
from pdserve.verify.compare import Verdict, compare
from pdserve.verify.prompts import chat_prompts, token_prompts
from pdserve.verify.reference import Reference

MAX_TOKENS = 12


IN_EVERY_RUN = {"qwen3", "gemma2"}
"""One per executor, each with what the others lack; the tiny Llama is in every other file."""


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=() if a in IN_EVERY_RUN else pytest.mark.slow) for a in ARCHITECTURES],
)
def test_the_service_says_what_the_model_says(architecture: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / architecture, arch=architecture, seed=1)
    reference = Reference(path, num_threads=1)
    prompts = token_prompts(reference.encode, 32, 200, 16) + chat_prompts(reference.chat_token_ids, 4)
    settings = {"DTYPE": "float32", "KV_DTYPE": "float32", "NUM_BLOCKS": 512, "HEARTBEAT_S": 0.3}
    with PrivateService(path, settings=settings) as service:
        asking = Asking(service.url, architecture, MAX_TOKENS, concurrency=8, cache_salt="")
        answers = asyncio.run(ask_all(asking, prompts))
        service.wait_until_nothing_is_held(15)
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None, f"{prompt.name}: {answer.error}"
        found = compare(prompt.token_ids, answer.token_ids, MAX_TOKENS, reference.generate)
        assert found.verdict is not Verdict.MISMATCH, f"{prompt.name}: {found.detail}"
        ties += found.verdict is Verdict.TIE
    assert ties <= 1
