"""Echo with logprobs and prompt_logprobs over real HTTP: whole, streamed, of several prompts and choices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from stand_in import Service, events_of, running, speak

TEXT = "the 👍 cat"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def ask(service: Service, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    response = await service.post(path, {"model": "tiny", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(service: Service, **body: Any) -> list[dict[str, Any]]:
    """The events, usage included, of a stream that ended well."""
    response = await service.post(COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}, **body})
    assert response.status_code == 200, response.text
    *events, last = events_of(response.text)
    assert last == "[DONE]"
    return [event for event in events if isinstance(event, dict)]


def starts(tokens: list[str]) -> list[int]:
    return [0, *itertools.accumulate(map(len, tokens))][:-1]


@pytest.mark.parametrize("is_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_echoed_tokens_join_to_the_text_and_the_first_has_no_logprob(
    tiny_model_dir: Path, is_ids: bool, max_tokens: int
) -> None:
    async with running(tiny_model_dir, speak(" sat on it", reason="length")) as service:
        ids = service.ids(TEXT)
        prompt = ids if is_ids else TEXT
        body = await ask(service, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
        events = await stream(service, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
        output = service.ids(" sat on it")[:max_tokens]
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == starts(logprobs["tokens"])
    assert logprobs["token_logprobs"] == [None, *[-float(n) for n in range(1, len(ids))], *[-0.25] * len(output)]
    assert logprobs["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        top = logprobs["top_logprobs"][place]
        assert top[logprobs["tokens"][place]] == -float(place)
        assert max(top.values()) == -0.5
    assert choice["finish_reason"] == "length"
    usage = {key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {
        "prompt_tokens": len(ids),
        "completion_tokens": len(output),
        "total_tokens": len(ids) + len(output),
    }
    # The same in a stream, whose first event carries the whole echoed prompt.
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert choices[0]["text"] == TEXT
    assert len(choices[0]["logprobs"]["tokens"]) == len(ids)
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert {name: [item for part in parts for item in part[name]] for name in logprobs} == logprobs
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == len(output)


async def test_several_prompts_and_choices_have_their_own_prompts_scores(tiny_model_dir: Path) -> None:
    prompts = ["the", "cat and you", "a"]
    async with running(tiny_model_dir, speak("x y z")) as service:
        body = await ask(service, prompt=prompts, n=2, echo=True, logprobs=0, max_tokens=2)
        ids = [service.ids(prompt) for prompt in prompts]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for choice in body["choices"]:
        prompt, scored = prompts[choice["index"] // 2], ids[choice["index"] // 2]
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"]["token_logprobs"][: len(scored)] == [
            None,
            *[-float(n) for n in range(1, len(scored))],
        ]
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


async def test_choices_wait_for_the_scores_of_their_prompt(tiny_model_dir: Path) -> None:
    """Tokens of other choices may come from faster workers: the first event still carries the prompt."""
    async with running(tiny_model_dir, speak("x y z")) as service:
        events = await stream(service, prompt=TEXT, n=3, echo=True, logprobs=1, max_tokens=3)
        num_tokens = len(service.ids(TEXT))
    first: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            first.setdefault(choice["index"], choice)
    assert sorted(first) == [0, 1, 2]
    assert all(len(choice["logprobs"]["tokens"]) == num_tokens for choice in first.values())


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_prompt_logprobs_tell_rank_and_text_of_each_token(tiny_model_dir: Path, count: int) -> None:
    async with running(tiny_model_dir, speak("x")) as service:
        ids, bytes_of = service.ids(TEXT), service.frontend.prompts.tokenizer.bytes_of
        body = await ask(service, prompt=TEXT, prompt_logprobs=count, max_tokens=1)
    (choice,) = body["choices"]
    assert choice["text"] == "x"
    assert choice["logprobs"] is None
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for place, (token_id, entry) in enumerate(zip(ids[1:], rest, strict=True), 1):
        text = bytes_of(token_id).decode("utf-8", "replace")
        own = {"logprob": -float(place), "rank": 2, "decoded_token": text}
        assert entry[str(token_id)] == own
        assert next(iter(entry)) == str(token_id)
        assert len(entry) == (1, 2, 2, 3)[count]
        if count:
            assert (entry[str(token_id + 1)]["logprob"], entry[str(token_id + 1)]["rank"]) == (-0.5, 1)
        if count > 2:
            assert entry[str(token_id + 2)]["logprob"] == -9999.0


async def test_echo_and_prompt_logprobs_together_show_as_many_as_each_asked_for(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("x")) as service:
        both = await ask(service, prompt="the cat and you", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=0)
        less = await ask(service, prompt="the cat and you", echo=True, logprobs=3, prompt_logprobs=1, max_tokens=0)
        assert [r.sampling.prompt_logprobs for r in service.dispatcher.requests] == [3, 3]
    for body, num_top, num_prompt in ((both, 2, 3), (less, 3, 2)):
        (choice,) = body["choices"]
        assert all(len(top) == num_top for top in choice["logprobs"]["top_logprobs"][1:])
        assert all(len(entry) == num_prompt for entry in choice["prompt_logprobs"][1:])


async def test_a_plain_answer_has_no_prompt_logprobs_and_scores_nothing(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("x")) as service:
        echo = await ask(service, prompt=TEXT, echo=True)
        plain = await ask(service, prompt=TEXT, logprobs=1)
        assert [r.sampling.prompt_logprobs for r in service.dispatcher.requests] == [None, None]
    assert all("prompt_logprobs" not in body["choices"][0] for body in (echo, plain))
    assert echo["choices"][0]["logprobs"] is None


async def test_a_chat_tells_its_prompts_log_probabilities_once(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("x")) as service:
        messages = [{"role": "user", "content": TEXT}]
        body = await ask(service, CHAT, messages=messages, prompt_logprobs=2, n=2, return_token_ids=True)
        plain = await ask(service, CHAT, messages=messages)
    assert [entry is None for entry in body["prompt_logprobs"][:2]] == [True, False]
    ids = body["prompt_token_ids"]
    assert [next(iter(entry)) for entry in body["prompt_logprobs"][1:]] == [str(token_id) for token_id in ids[1:]]
    assert "prompt_logprobs" not in plain


@pytest.mark.parametrize(("path", "fields", "param"), [
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0, "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    (COMPLETIONS, {"prompt": "", "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": "1"}, "prompt_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
])  # fmt: skip
async def test_wrong_values_are_refused_by_name(
    tiny_model_dir: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    async with running(tiny_model_dir, speak("x")) as service:
        response = await service.post(path, fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [
    {"prompt": [[5] * 400] * 250, "prompt_logprobs": 20},
    {"prompt": [[5] * 400] * 250, "logprobs": 20, "echo": True, "max_tokens": 0},
    {"prompt": [5] * 1000, "prompt_logprobs": 20, "n": 128},
])  # fmt: skip
async def test_more_numbers_than_memory_should_hold_are_refused(tiny_model_dir: Path, fields: dict[str, Any]) -> None:
    async with running(tiny_model_dir, speak("x")) as service:
        response = await service.post(COMPLETIONS, fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs"), response.text
        assert service.dispatcher.requests == []
        fewer = {**fields, "n": 1, "prompt": [5] * 1000}
        assert (await service.post(COMPLETIONS, fewer)).status_code == 200
