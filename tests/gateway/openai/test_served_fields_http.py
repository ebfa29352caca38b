"""Fields of vLLM's API that are served: prompts cut to length, bad words, token names, usage in every event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_in import Service, events_of, running, speak

from pdserve.sampling_params import SamplingParams

COMPLETIONS, CHAT, RENDER = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/render"
TEXT = "the cat sat on the mat and the dog"
HELLO = {"messages": [{"role": "user", "content": TEXT}]}


async def good(service: Service, path: str, **body: Any) -> dict[str, Any]:
    response = await service.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def sampling_of(service: Service, **body: Any) -> SamplingParams:
    await good(service, COMPLETIONS, prompt="a", **body)
    return service.dispatcher.requests[-1].sampling


# --- truncate_prompt_tokens


@pytest.mark.parametrize("is_ids", [False, True])
@pytest.mark.parametrize(("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))])
async def test_a_prompt_is_cut_to_its_end_or_its_beginning(
    tiny_model_dir: Path, is_ids: bool, side: str | None, kept: slice
) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        ids = service.ids(TEXT)
        body = {"prompt": ids if is_ids else TEXT, "truncate_prompt_tokens": 3, "truncation_side": side, "echo": True}
        answer = await good(service, COMPLETIONS, **body)
        tokenizer = service.frontend.prompts.tokenizer
    assert service.dispatcher.requests[0].prompt_token_ids == ids[kept]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"] == tokenizer.decode(ids[kept]) + "a"


async def test_every_prompt_of_a_list_is_cut_and_short_ones_stay(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        await good(service, COMPLETIONS, prompt=[[5, 6, 7, 8], [5], [8, 9]], truncate_prompt_tokens=2)
    assert [request.prompt_token_ids for request in service.dispatcher.requests] == [[7, 8], [5], [8, 9]]


@pytest.mark.parametrize(
    ("fields", "num_kept"),
    [({"max_tokens": 10}, 10), ({}, 4), ({"max_tokens": 19}, 1), ({"truncation_side": "right"}, 4)],
)
async def test_minus_one_leaves_room_for_the_output(
    tiny_model_dir: Path, fields: dict[str, Any], num_kept: int
) -> None:
    async with running(tiny_model_dir, speak("a"), max_total_tokens=20) as service:
        await good(service, COMPLETIONS, prompt=list(range(5, 65)), truncate_prompt_tokens=-1, **fields)
    assert len(service.dispatcher.requests[0].prompt_token_ids) == num_kept


async def test_a_chat_is_cut_and_rendering_shows_it(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        whole = (await good(service, RENDER, **HELLO))["prompt_token_ids"]
        shown = await good(service, RENDER, **HELLO, truncate_prompt_tokens=5)
        await good(service, CHAT, **HELLO, truncate_prompt_tokens=5)
        tokenizer = service.frontend.prompts.tokenizer
    assert service.dispatcher.requests[0].prompt_token_ids == whole[-5:] == shown["prompt_token_ids"]
    assert shown["prompt"] == tokenizer.decode(whole[-5:])


@pytest.mark.parametrize("value", [0, -2, 1.5, "5", True])
async def test_a_wrong_length_is_refused(tiny_model_dir: Path, value: Any) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.post(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


# --- bad_words, allowed_token_ids


async def test_a_word_is_forbidden_as_it_is_and_after_a_blank(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        sampling = await sampling_of(service, bad_words=["cat", " the", "cat", "xyz q"])
        plain, spaced = service.ids("cat"), service.ids(" cat")
        the, spaced_the = service.ids("the"), service.ids(" the")
    assert tuple(plain) in sampling.bad_words
    assert (tuple(spaced) in sampling.bad_words) is (len(spaced) == len(plain))
    assert tuple(the) in sampling.bad_words
    assert (tuple(spaced_the) in sampling.bad_words) is (len(the) == len(spaced_the))
    assert len(sampling.bad_words) == len(set(sampling.bad_words))


@pytest.mark.parametrize("value", [[""], [" "], "cat", [5], [["cat"]], ["x" * 257], ["x"] * 129, {"a": 1}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_wrong_bad_words_are_refused(tiny_model_dir: Path, path: str, value: Any) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.post(path, {"prompt": "a", **HELLO, "bad_words": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "bad_words"


@pytest.mark.parametrize("value", [[], [-1], [10**6], [True], ["5"], 5, [None], [1.0]])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_wrong_allowed_ids_are_refused(tiny_model_dir: Path, path: str, value: Any) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.post(path, {"prompt": "a", **HELLO, "allowed_token_ids": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "allowed_token_ids"


async def test_nothing_is_forbidden_by_null_or_an_empty_list(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        silent = await sampling_of(service, seed=1)
        assert await sampling_of(service, seed=1, bad_words=[], allowed_token_ids=None) == silent
        given = await sampling_of(service, seed=1, allowed_token_ids=[9, 5, 9])
    assert given.allowed_token_ids == (5, 9)


# --- return_tokens_as_token_ids


async def test_completions_name_tokens_by_their_ids(tiny_model_dir: Path) -> None:
    body = {"prompt": "the", "logprobs": 2, "echo": True}
    async with running(tiny_model_dir, speak(" cat 雪", reason="length")) as service:
        plain = (await good(service, COMPLETIONS, **body))["choices"][0]
        named = (await good(service, COMPLETIONS, **body, return_tokens_as_token_ids=True))["choices"][0]
        response = await service.post(COMPLETIONS, {**body, "stream": True, "return_tokens_as_token_ids": True})
        ids = [*service.ids("the"), *service.ids(" cat 雪")]
    *events, _ = events_of(response.text)
    assert named["text"] == plain["text"]
    assert named["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert named["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    for token_id, top in zip(ids[1:], named["logprobs"]["top_logprobs"][1:], strict=True):
        assert f"token_id:{token_id}" in top
        assert all(name.startswith("token_id:") for name in top)
    parts = [choice["logprobs"]["tokens"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [name for part in parts for name in part] == named["logprobs"]["tokens"]


async def test_chats_name_tokens_by_their_ids_and_keep_their_bytes(tiny_model_dir: Path) -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    async with running(tiny_model_dir, speak("cat 雪", reason="length")) as service:
        plain = (await good(service, CHAT, **body))["choices"][0]
        named = (await good(service, CHAT, **body, return_tokens_as_token_ids=True))["choices"][0]
        ids = service.ids("cat 雪")
    content = named["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in ids]
    assert [entry["top_logprobs"][1]["token"] for entry in content] == [f"token_id:{token_id + 1}" for token_id in ids]
    assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in plain["logprobs"]["content"]]


async def test_without_log_probabilities_there_are_no_names(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("cat")) as service:
        answer = await good(service, CHAT, **HELLO, return_tokens_as_token_ids=True)
    assert answer["choices"][0]["logprobs"] is None


# --- continuous_usage_stats


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
async def test_every_event_tells_the_usage_of_its_choice_so_far(tiny_model_dir: Path, path: str, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running(tiny_model_dir, speak("the cat sat on it", reason="length")) as service:
        body = {"prompt": "the", **HELLO, "n": n, "stream": True, "stream_options": options}
        response = await service.post(path, body)
        num_output_tokens = len(service.ids("the cat sat on it"))
    *events, last, done = events_of(response.text)
    assert done == "[DONE]"
    num_prompt_tokens = len(service.dispatcher.requests[0].prompt_token_ids)
    for index in range(n):
        told = [event["usage"] for event in events if event["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts)
        assert counts[-1] == num_output_tokens
        assert path == COMPLETIONS or counts[0] == 0
        assert {usage["prompt_tokens"] for usage in told} == {num_prompt_tokens}
        assert all(usage["total_tokens"] == num_prompt_tokens + usage["completion_tokens"] for usage in told)
    assert last["usage"]["completion_tokens"] == n * num_output_tokens


async def test_each_prompt_of_a_list_has_its_own_count(tiny_model_dir: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [[5, 6, 7], [8]], "stream": True, "stream_options": options, "max_tokens": 2}
    async with running(tiny_model_dir, speak("the cat sat")) as service:
        responses = [
            await service.post(COMPLETIONS, {**body, **more}) for more in ({}, {"echo": True, "max_tokens": 0})
        ]
    for response in responses:
        *events, _, _ = events_of(response.text)
        told = {(event["choices"][0]["index"], event["usage"]["prompt_tokens"]) for event in events}
        assert told == {(0, 3), (1, 1)}


async def test_without_the_option_usage_is_null_until_the_last_event(tiny_model_dir: Path) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    async with running(tiny_model_dir, speak("the cat")) as service:
        *events, last, _ = events_of((await service.post(COMPLETIONS, body)).text)
    assert {event["usage"] for event in events} == {None}
    assert last["usage"]["completion_tokens"] > 0
