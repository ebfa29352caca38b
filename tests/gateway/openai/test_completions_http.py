"""Completions over real HTTP: texts, token ids, several prompts, echo and log-probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from stand_in import Service, events_of, running, speak

from pdserve.errors import UnavailableError
from pdserve.gateway.generation.request import GenerationRequest

PATH = "/v1/completions"


async def complete(service: Service, prompt: Any, **fields: Any) -> Completion:
    response = await service.post(PATH, {"model": "tiny", "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return Completion.model_validate(response.json())


async def streamed(service: Service, prompt: Any, **fields: Any) -> dict[int, dict[str, Any]]:
    """Choices by index, their pieces joined."""
    response = await service.post(PATH, {"prompt": prompt, "stream": True, **fields})
    assert response.status_code == 200, response.text
    *events, last = events_of(response.text)
    assert last == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        Completion.model_validate({**event, "choices": [{**c, "finish_reason": "stop"} for c in event["choices"]]})
        for choice in event["choices"]:
            known = choices.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": []})
            assert known["finish_reason"] is None
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"]
            known["logprobs"].append(choice["logprobs"])
    return choices


def echo_prompt(request: GenerationRequest, choice: int) -> list[Any]:
    """The prompt's own tokens, backwards for the second choice."""
    return [request.prompt_token_ids[:: -1 if choice else 1], "length"]


async def test_a_text_prompt(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak(" cat 雪 sat", reason="length")) as service:
        body = await complete(service, "the")
        stream = await streamed(service, "the")
        request = service.dispatcher.requests[0]
        assert request.prompt_token_ids == service.ids("the")
    assert request.sampling.max_tokens == 16
    assert body.choices[0].text == stream[0]["text"] == " cat 雪 sat"
    assert body.choices[0].finish_reason == stream[0]["finish_reason"] == "length"
    assert body.object == "text_completion"


async def test_special_tokens_in_a_raw_text_are_special(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        await complete(service, "<|im_start|>user")
        assert service.dispatcher.requests[0].prompt_token_ids[0] == service.ids("<|im_start|>")[0]
        assert len(service.ids("<|im_start|>")) == 1


async def test_token_ids_are_taken_as_they_are(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        body = await complete(service, [5, 6, 7])
        assert service.dispatcher.requests[0].prompt_token_ids == [5, 6, 7]
    assert body.usage is not None
    assert body.usage.prompt_tokens == 3


@pytest.mark.parametrize("prompts", [["the", "cat and"], [[90, 91], [92]], ["the"]])
async def test_several_prompts_with_several_choices(tiny_model_dir: Path, prompts: Any) -> None:
    async with running(tiny_model_dir, echo_prompt) as service:
        body = await complete(service, prompts, n=2)
        stream = await streamed(service, prompts, n=2)
        ids = [service.ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        decode = service.frontend.prompts.tokenizer.decode
        expected = [decode(part) for prompt in ids for part in (prompt, prompt[::-1])]
        assert len({request.request_id for request in service.dispatcher.requests}) == 2 * len(prompts)
    assert [choice.text for choice in body.choices] == expected
    assert [choice.index for choice in body.choices] == list(range(2 * len(prompts)))
    assert [stream[index]["text"] for index in range(len(expected))] == expected
    assert body.usage is not None
    assert body.usage.prompt_tokens == sum(map(len, ids))
    assert body.usage.completion_tokens == 2 * sum(map(len, ids))


async def test_one_failing_prompt_fails_and_cancels_all(tiny_model_dir: Path) -> None:
    never = asyncio.Event()

    def script(request: GenerationRequest, choice: int) -> list[Any]:
        return [never] if request.request_id.endswith("-0") else [UnavailableError("gone")]

    async with running(tiny_model_dir, script) as service:
        response = await service.post(PATH, {"prompt": ["a", "b"]})
        assert response.status_code == 503
        assert [request_id[-2:] for request_id, _ in service.dispatcher.cancels] == ["-0"]
        never.set()


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""]])
async def test_an_empty_prompt_without_a_beginning_token_is_refused_and_the_gateway_lives(
    tiny_model_dir: Path, prompt: Any
) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.post(PATH, {"prompt": prompt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        await complete(service, "x")


async def test_echo_puts_the_prompt_first(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak(" cat")) as service:
        whole = await complete(service, "the", echo=True)
        stream = await streamed(service, "the", echo=True)
        ids = await complete(service, service.ids("the"), echo=True)
    assert whole.choices[0].text == stream[0]["text"] == ids.choices[0].text == "the cat"


async def test_echo_alone_generates_nothing(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("never")) as service:
        whole = await complete(service, ["the", "cat"], echo=True, max_tokens=0)
        stream = await streamed(service, ["the", "cat"], echo=True, max_tokens=0)
        assert service.dispatcher.requests == []
    assert [choice.text for choice in whole.choices] == ["the", "cat"]
    assert [stream[0]["text"], stream[1]["text"]] == ["the", "cat"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 0


async def test_logprobs_join_to_the_text_with_monotone_offsets(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("the 👍 cat")) as service:
        body = await complete(service, "x", logprobs=3, max_tokens=100)
        stream = await streamed(service, "x", logprobs=3, max_tokens=100)
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert "".join(tokens) == "the 👍 cat"
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]
    assert body.usage is not None
    assert len(tokens) == body.usage.completion_tokens
    tops = logprobs.top_logprobs or []
    assert all(top[token] == -0.25 and min(top.values()) >= -9999.0 for top, token in zip(tops, tokens, strict=True))
    joined = [piece for piece in stream[0]["logprobs"] if piece]
    assert [token for piece in joined for token in piece["tokens"]] == tokens
    assert [offset for piece in joined for offset in piece["text_offset"]] == offsets


@pytest.mark.parametrize(
    "more", [{}, {"return_token_ids": True}, {"stop": ["zz"]}, {"n": 2}], ids=["", "ids", "stop", "n"]
)
@pytest.mark.parametrize(("text", "num_cut"), [("the 👍", 1), ("the 👍", 2), ("👍", 3), ("雪", 1), ("a雪b雪", 2)])
async def test_offsets_go_on_to_what_is_left_of_a_cut_character(
    tiny_model_dir: Path, text: str, num_cut: int, more: dict[str, Any]
) -> None:
    async with running(tiny_model_dir, speak(text)) as service:
        fields = {"logprobs": 1, "max_tokens": len(service.ids(text)) - num_cut, **more}
        body = await complete(service, "x", **fields)
        stream = await streamed(service, "x", **fields)
    for choice in body.choices:
        assert choice.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        assert choice.text.endswith("\ufffd")
        assert "".join(tokens) == choice.text == stream[choice.index]["text"]
        assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]
        joined = [piece for piece in stream[choice.index]["logprobs"] if piece]
        assert [token for piece in joined for token in piece["tokens"]] == tokens
        assert [offset for piece in joined for offset in piece["text_offset"]] == offsets
