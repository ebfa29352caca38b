"""The official client against a whole disaggregated service; what it gets is compared with the model itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import openai
import pytest
import torch

from pdserve.local.service import PrivateService
from pdserve.verify.reference import Reference

QUESTION = [{"role": "user", "content": "Tell me about the 河 and the 🚲."}]


@pytest.fixture(scope="module")
def client(service: PrivateService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_stays_held(service: PrivateService) -> Iterator[None]:
    yield
    service.wait_until_nothing_is_held(10)


def text_of(reference: Reference, token_ids: list[int]) -> str:
    skipped = [t for t in token_ids if t not in reference.card.eos_token_ids]
    return str(reference._tokenizer.decode(skipped, skip_special_tokens=True))


def test_the_model_is_listed(client: openai.OpenAI, model: str) -> None:
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_chat_is_what_the_model_says(client: openai.OpenAI, model: str, reference: Reference) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=24)
    prompt = reference.chat_token_ids(QUESTION[0]["content"])
    expected = list(reference.generate(prompt, 24).token_ids)
    assert answer.choices[0].message.content == text_of(reference, expected)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected))
    assert answer.choices[0].message.role == "assistant"


def test_a_streamed_chat_is_the_same(client: openai.OpenAI, model: str) -> None:
    more = {"model": model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**more)
    chunks = list(client.chat.completions.create(**more, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role] == ["assistant"]
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_what_the_model_says(
    client: openai.OpenAI, model: str, reference: Reference, stream: bool
) -> None:
    prompt = reference.encode("def area(width, height):\n    return")
    expected = text_of(reference, list(reference.generate(prompt, 20).token_ids))
    answer = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=20, stream=stream)
    text = "".join(c.choices[0].text for c in answer if c.choices) if stream else answer.choices[0].text
    assert text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_is_one_token_and_never_involves_decode(
    client: openai.OpenAI, service: PrivateService, model: str, reference: Reference, stream: bool
) -> None:
    prompt = reference.encode("one token only, please")
    expected = text_of(reference, list(reference.generate(prompt, 1).token_ids))
    answer = client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=1, stream=stream, extra_body={"ignore_eos": True}
    )
    if stream:
        chunks = [c.choices[0] for c in answer if c.choices]
        assert "".join(c.text for c in chunks) == expected
        assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]
        assert sum(bool(c.text) for c in chunks) <= 1
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
        assert answer.usage.completion_tokens == 1
    assert service.ledgers()["decode-0"]["by_request"] == {}


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_n_different_answers_each_with_one_end(client: openai.OpenAI, model: str, stream: bool) -> None:
    more = {"model": model, "messages": QUESTION, "n": 2, "seed": 5, "temperature": 1.5, "max_completion_tokens": 12}
    if not stream:
        answer = client.chat.completions.create(**more)
        texts = {c.index: c.message.content for c in answer.choices}
        ends = [c.finish_reason for c in answer.choices]
        assert answer.usage is not None
        assert 2 <= answer.usage.completion_tokens <= 24
    else:
        parts: dict[int, str] = defaultdict(str)
        ends = []
        for chunk in client.chat.completions.create(**more, stream=True):
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
        texts = dict(parts)
    assert set(texts) == {0, 1}
    assert texts[0] != texts[1]
    assert len(ends) == 2


def test_n_greedy_choices_are_equal(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, n=3, temperature=0, max_completion_tokens=8)
    assert len({c.message.content for c in answer.choices}) == 1
    assert len(answer.choices) == 3


def test_a_seed_repeats_an_answer_and_another_seed_does_not(client: openai.OpenAI, model: str) -> None:
    def answer(seed: int) -> str | None:
        more = {"temperature": 1.2, "max_completion_tokens": 16}
        return (
            client.chat.completions.create(model=model, messages=QUESTION, seed=seed, **more).choices[0].message.content
        )

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_chat_logprobs_are_the_models(client: openai.OpenAI, model: str, reference: Reference) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=6, logprobs=True, top_logprobs=3
    )
    prompt = reference.chat_token_ids(QUESTION[0]["content"])
    tokens = list(reference.generate(prompt, 6).token_ids)
    content = answer.choices[0].logprobs.content
    assert len(content) == len(tokens)
    for index, entry in enumerate(content):
        truth = torch.log_softmax(reference.logits_after([*prompt, *tokens[:index]]), -1)
        assert entry.logprob == pytest.approx(float(truth[tokens[index]]), abs=1e-3)
        best = truth.topk(3).values.tolist()
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-3)


def test_completion_logprobs_are_the_models(client: openai.OpenAI, model: str, reference: Reference) -> None:
    prompt = reference.encode("The river")
    answer = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=5, logprobs=2)
    tokens = list(reference.generate(prompt, 5).token_ids)
    logprobs = answer.choices[0].logprobs
    for index, value in enumerate(logprobs.token_logprobs):
        truth = torch.log_softmax(reference.logits_after([*prompt, *tokens[:index]]), -1)
        assert value == pytest.approx(float(truth[tokens[index]]), abs=1e-3)
        assert math.isclose(max(logprobs.top_logprobs[index].values()), value, abs_tol=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(
    client: openai.OpenAI, model: str, reference: Reference, stream: bool
) -> None:
    prompt = reference.encode("tell me more and more")
    text = text_of(reference, list(reference.generate(prompt, 24).token_ids))
    printable = [i for i in range(2, len(text) - 3) if text[i : i + 3].isprintable() and "�" not in text[i : i + 3]]
    stop = text[printable[len(printable) // 2] :][:3]
    answer = client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=24, stop=[stop], stream=stream
    )
    if stream:
        chunks = [c.choices[0] for c in answer if c.choices]
        got, reasons = "".join(c.text for c in chunks), [c.finish_reason for c in chunks if c.finish_reason]
    else:
        got, reasons = answer.choices[0].text, [answer.choices[0].finish_reason]
    assert got == text[: text.index(stop)]
    assert reasons == ["stop"]


def test_logit_bias_forces_and_forbids(client: openai.OpenAI, model: str, reference: Reference) -> None:
    prompt = reference.encode("bias")
    first = reference.generate(prompt, 1).token_ids[0]
    wanted = reference.encode("x")[0]

    def tokens(**more: object) -> list[int]:
        answer = client.completions.create(
            model=model, prompt=prompt, temperature=0, max_tokens=4, extra_body={"return_token_ids": True}, **more
        )
        return list(answer.choices[0].token_ids)

    assert tokens(logit_bias={str(wanted): 100}) == [wanted] * 4
    assert tokens(logit_bias={str(first): -100})[0] != first


def test_an_end_of_sequence_as_first_token_ends_the_answer(
    client: openai.OpenAI, model: str, reference: Reference
) -> None:
    bias = {str(min(reference.card.eos_token_ids)): 100}
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, logit_bias=bias)
    assert (answer.choices[0].message.content or "") == ""
    assert answer.choices[0].finish_reason == "stop"
    ignored = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, logit_bias=bias, max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert ignored.usage is not None
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [2**31]}}, openai.BadRequestError, "stop_token_ids"),
        ({"max_completion_tokens": 10**7}, openai.BadRequestError, None),
        ({"model": "nobody"}, openai.NotFoundError, None),
    ],
)
def test_a_wrong_request_is_the_clients_own_exception_and_the_service_lives(
    client: openai.OpenAI, model: str, fields: dict, error: type[Exception], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**({"model": model, "messages": QUESTION} | fields))
    if param is not None:
        assert param in (caught.value.param or "")
    client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=2)


def test_the_waterfall_of_one_request_adds_up(open_stream: Callable[..., object]) -> None:
    with open_stream(list(range(60, 160)), 12, headers={"X-PDServe-Timing": "1"}, ignore_eos=True) as stream:
        stream.read()
    timing = stream.usage["timing"]
    stages = [timing[f"{stage}_s"] for stage in ("frontend", "queue", "schedule", "prefill", "publish")]
    assert sum(stages) == pytest.approx(timing["ttft_s"], abs=1e-5)
    assert timing["ttft_s"] + timing["decode_s"] == pytest.approx(timing["total_s"], abs=1e-5)
    assert all(stage >= 0 for stage in stages)
    assert 0 < timing["handoff_gap_s"] <= timing["decode_s"]
    assert timing["transfer_bytes"] > 0
