"""Whole services score prompts as transformers does: cold, cached, in chunks, and dispatched again."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.local.service import PrivateService, ServiceProcess

SERVICE: dict[str, Any] = {
    "num": {"prefill": 2, "decode": 2},
    "settings": {"NUM_BLOCKS": 512, "MAX_NUM_BATCHED_TOKENS": 64, "MAX_NUM_SEQS": 16},
    "faults": {},
}
"""Prompts longer than the token budget are computed in chunks."""
TOLERANCE = 1e-3


class Truth:
    """transformers' own forward pass."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def table(self, token_ids: list[int]) -> torch.Tensor:
        """`[len(token_ids) - 1, vocab_size]`: log-probabilities of each next token."""
        table: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(1)
        return table

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Of every token but the first."""
        return [float(row[token_id]) for row, token_id in zip(self.table(token_ids), token_ids[1:], strict=True)]


@pytest.fixture(scope="module")
def truth(tiny_model_dir: Path) -> Truth:
    return Truth(tiny_model_dir)


@pytest.fixture(scope="module")
def client(service: PrivateService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _healthy(service: PrivateService) -> Iterator[None]:
    """Every test leaves a service that runs, without faults, and holds nothing."""
    yield
    for process in service.processes:
        if process.pid is None:
            service.restart(process.role, process.index, wait_s=None)
    service.wait_ready(60)
    for process in service.processes:
        service.put_faults(process.role, {}, process.index)
    service.wait_until_nothing_is_held(20)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Printable characters, one token each: `top_logprobs` has one place for each text."""
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


def ask(url: str, http: httpx.Client, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    """The choices of one answer, in order."""
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0, **fields}
    response = http.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def assert_true(choice: dict[str, Any], token_ids: list[int], truth: Truth) -> None:
    """The prompt's part of a choice's `logprobs`."""
    first, *got = choice["logprobs"]["token_logprobs"][: len(token_ids)]
    assert first is None
    assert got == pytest.approx(truth.logprobs(token_ids), abs=TOLERANCE)
    best = truth.table(token_ids).max(1).values.tolist()
    tops = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1 : len(token_ids)]]
    assert tops == pytest.approx(best, abs=TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 200])
def test_a_prompt_is_scored_the_same_cold_cached_and_in_chunks(
    service: PrivateService, http: httpx.Client, truth: Truth, length: int
) -> None:
    prompt = prompt_of(length, length)
    for max_tokens in (0, 1, 0, 4):  # then with all its blocks in every cache
        (choice,) = ask(service.url, http, prompt, max_tokens=max_tokens)
        assert_true(choice, prompt, truth)
        assert len(choice["logprobs"]["tokens"]) == length + max_tokens


def test_what_is_generated_behind_a_scored_prompt_is_scored_on(
    service: PrivateService, http: httpx.Client, truth: Truth
) -> None:
    prompt = prompt_of(40, 7)
    (choice,) = ask(service.url, http, prompt, max_tokens=12, return_token_ids=True, ignore_eos=True)
    assert_true(choice, prompt + choice["token_ids"], truth)


def test_lists_of_texts_and_of_ids_are_scored_each_by_itself(
    service: PrivateService, http: httpx.Client, truth: Truth
) -> None:
    texts = ["the cat sat on the mat", "a 河 and a 🚲", "x", "they have been there from the first word on " * 4]
    ids = [truth.tokenizer(text)["input_ids"] for text in texts]
    for prompts in (texts, ids):
        choices = ask(service.url, http, prompts)
        assert [choice["text"] for choice in choices] == texts
        for choice, token_ids in zip(choices, ids, strict=True):
            assert_true(choice, token_ids, truth)
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_choices_share_their_prompts_scores(service: PrivateService, http: httpx.Client, truth: Truth) -> None:
    prompts = [prompt_of(30, 8), prompt_of(70, 9)]
    choices = ask(service.url, http, prompts, n=3, max_tokens=2, temperature=1, seed=3)
    for choice in choices:
        assert_true(choice, prompts[choice["index"] // 3], truth)


def test_the_official_client_reads_echo_and_streams(
    service: PrivateService, client: openai.OpenAI, model: str, truth: Truth
) -> None:
    text = "the cat sat on the block cache"
    ids = truth.tokenizer(text)["input_ids"]
    whole = client.completions.create(model=model, prompt=text, echo=True, logprobs=1, max_tokens=0)
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 0)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[1:] == pytest.approx(truth.logprobs(ids), abs=TOLERANCE)
    chunks = list(
        client.completions.create(
            model=model, prompt=text, echo=True, logprobs=1, max_tokens=3, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].text == text
    streamed = chunks[0].choices[0].logprobs
    assert streamed is not None
    assert streamed.token_logprobs == logprobs.token_logprobs


@pytest.mark.parametrize("count", [0, 3, 20])
def test_prompt_logprobs_have_ranks_and_the_best_alternatives(
    client: openai.OpenAI, model: str, truth: Truth, count: int
) -> None:
    prompt = prompt_of(90, 11)
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": count}
    )
    first, *entries = (answer.choices[0].model_extra or {})["prompt_logprobs"]
    assert first is None
    for row, token_id, entry in zip(truth.table(prompt), prompt[1:], entries, strict=True):
        assert entry[str(token_id)]["logprob"] == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert entry[str(token_id)]["rank"] == pytest.approx(int((row >= row[token_id]).sum()), abs=1)
        assert entry[str(token_id)]["decoded_token"] == truth.tokenizer.decode([token_id])
        by_rank = {told["rank"]: told["logprob"] for told in entry.values()}
        best = row.sort(descending=True).values
        for rank in range(1, count + 1):
            assert by_rank[rank] == pytest.approx(float(best[rank - 1]), abs=TOLERANCE)


def test_a_chats_prompt_is_scored(client: openai.OpenAI, model: str, truth: Truth) -> None:
    messages: Any = [{"role": "user", "content": "how about the token cache?"}]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=2, temperature=0, extra_body={"prompt_logprobs": 1}
    )
    text = truth.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = truth.tokenizer(text)["input_ids"]
    first, *entries = (answer.model_extra or {})["prompt_logprobs"]
    assert first is None
    got = [entry[str(token_id)]["logprob"] for token_id, entry in zip(ids[1:], entries, strict=True)]
    assert got == pytest.approx(truth.logprobs(ids), abs=TOLERANCE)


def test_a_prompt_may_fill_the_whole_context_when_nothing_follows(
    service: PrivateService, http: httpx.Client, truth: Truth
) -> None:
    prompt = prompt_of(4096, 12)
    (choice,) = ask(service.url, http, prompt)
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(truth.logprobs(prompt), abs=TOLERANCE)
    response = http.post(
        f"{service.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_prefill_worker_killed_amid_the_prompt_changes_nothing(
    service: PrivateService, http: httpx.Client, truth: Truth, wait_for: Callable[..., Any], max_tokens: int
) -> None:
    """Chunks of 64 tokens, 0.3 s each: the first worker dies with some of them told, another one begins again."""
    prompt = prompt_of(900, 13 + max_tokens)
    for process in service.workers:
        if process.role == "prefill":
            service.put_faults("prefill", {"step_delay_s": 0.3}, process.index)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.extend(ask(service.url, http, prompt, max_tokens=max_tokens)))
    asking.start()

    def amid_the_prompt() -> ServiceProcess | None:
        for process in service.workers:
            attempts = http.get(f"{process.url}/debug/requests").json() if process.role == "prefill" else []
            if any(128 <= attempt["num_computed_tokens"] < len(prompt) for attempt in attempts):
                return process
        return None

    victim = wait_for(amid_the_prompt, 20, "a few chunks are computed")
    service.kill("prefill", victim.index)
    service.put_faults("prefill", {}, 1 - victim.index)
    asking.join(60)
    (choice,) = found
    assert_true(choice, prompt, truth)
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
    metrics = http.get(service.process("gateway").metrics_url).text
    assert re.search(r'^pd_redispatch_total\{.*phase="prefill".*\} [1-9]', metrics, re.MULTILINE)


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("fault", ["drop", "duplicate", "reorder"])
def test_messages_that_are_lost_doubled_or_late_change_nothing(
    service: PrivateService, http: httpx.Client, truth: Truth, fault: str, max_tokens: int
) -> None:
    for process in service.workers:
        service.put_faults(process.role, {fault: {"message": "PromptLogprobs", "times": 3}}, process.index)
    prompt = prompt_of(600, 70)
    (choice,) = ask(service.url, http, prompt, max_tokens=max_tokens)
    assert_true(choice, prompt, truth)
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens


def test_many_prompts_at_once_are_scored_among_others_that_are_not(
    service: PrivateService, http: httpx.Client, truth: Truth
) -> None:
    prompts = [prompt_of(5 + 9 * index, 40 + index) for index in range(24)]
    found: dict[str, list[dict[str, Any]]] = {}
    plain = threading.Thread(
        target=lambda: found.update(plain=ask(service.url, http, prompts, logprobs=None, max_tokens=20))
    )
    plain.start()
    choices = ask(service.url, http, prompts)
    plain.join(60)
    for choice, prompt in zip(choices, prompts, strict=True):
        assert_true(choice, prompt, truth)
    assert len(found["plain"]) == len(prompts)


@pytest.mark.parametrize("executor", ["auto", "transformers"])
def test_decode_workers_alone_score_prompts_too(
    tiny_model_dir: Path, http: httpx.Client, truth: Truth, executor: str
) -> None:
    settings = {"DISAGGREGATION": "never", "NUM_BLOCKS": 256, "MAX_NUM_BATCHED_TOKENS": 32, "MAX_NUM_SEQS": 8}
    counts = {"prefill": 0, "decode": 1}
    with PrivateService(tiny_model_dir, num=counts, settings=settings | {"EXECUTOR": executor}) as service:
        for length in (1, 33, 150):
            prompt = prompt_of(length, 60 + length)
            for max_tokens in (0, 3):
                (choice,) = ask(service.url, http, prompt, max_tokens=max_tokens)
                assert_true(choice, prompt, truth)
