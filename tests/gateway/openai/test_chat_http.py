"""Chats over real HTTP: bodies and streams as the official client's models want them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from stand_in import Service, events_of, running, speak

from pdserve.errors import InvalidRequestError, OverloadedError, UnavailableError
from pdserve.models.tiny_tokenizer import TURN_END, build_tokenizer

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
EOS = build_tokenizer().token_to_id(TURN_END)


async def chunks(service: Service, **fields: Any) -> list[ChatCompletionChunk]:
    """The chunks of a stream that really ended."""
    response = await service.post(PATH, {**HELLO, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = events_of(response.text)
    assert last == "[DONE]"
    return [ChatCompletionChunk.model_validate(event) for event in events]


def text_of(stream: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_a_body_is_what_the_client_library_expects(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("the cat 👍 sat"), num_cached_tokens=3) as service:
        response = await service.post(PATH, HELLO)
        body = ChatCompletion.model_validate(response.json())
        num_output = len(service.ids("the cat 👍 sat"))
        (request,) = service.dispatcher.requests
    assert body.choices[0].message.content == "the cat 👍 sat"
    assert body.choices[0].message.role == "assistant"
    assert body.choices[0].finish_reason == "stop"
    assert body.model == "tiny"
    assert body.usage is not None
    assert body.usage.prompt_tokens == len(request.prompt_token_ids)
    assert body.usage.completion_tokens == num_output
    assert body.usage.total_tokens == body.usage.prompt_tokens + num_output
    assert body.usage.prompt_tokens_details is not None
    assert body.usage.prompt_tokens_details.cached_tokens == 3
    assert body.id == request.request_id


@pytest.mark.parametrize("together", [1, 3, 100])
async def test_a_stream_has_one_role_one_finish_reason_and_the_whole_text(tiny_model_dir: Path, together: int) -> None:
    async with running(tiny_model_dir, speak("the cat 👍 sat", together=together)) as service:
        stream = await chunks(service)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert deltas[0].content == ""
    assert text_of(stream) == "the cat 👍 sat"
    assert [chunk.choices[0].finish_reason for chunk in stream[:-1]] == [None] * (len(stream) - 1)
    assert stream[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in stream}) == 1


async def test_usage_comes_last_and_only_on_request(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("the cat")) as service:
        num_output = len(service.ids("the cat"))
        without = await service.post(PATH, {**HELLO, "stream": True})
        off = await service.post(PATH, {**HELLO, "stream": True, "stream_options": {"include_usage": False}})
        with_usage = await service.post(PATH, {**HELLO, "stream": True, "stream_options": {"include_usage": True}})
    for response in (without, off):
        assert all("usage" not in event for event in events_of(response.text)[:-1])
    *events, usage, _ = events_of(with_usage.text)
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == num_output


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"stop": ["zz", "\ufffdx"]}], ids=["", "ids", "stop"])
@pytest.mark.parametrize(("text", "num_cut"), [("the 👍", 1), ("the 👍", 2), ("👍", 3), ("雪", 1), ("a雪b雪", 2)])
async def test_logprobs_have_what_is_left_of_a_cut_character(
    tiny_model_dir: Path, text: str, num_cut: int, more: dict[str, Any]
) -> None:
    async with running(tiny_model_dir, speak(text)) as service:
        num_tokens = len(service.ids(text)) - num_cut
        fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": num_tokens, **more}
        body = ChatCompletion.model_validate((await service.post(PATH, {**HELLO, **fields})).json())
        stream = await chunks(service, **fields)
    assert body.choices[0].logprobs is not None
    content, entries = body.choices[0].message.content, body.choices[0].logprobs.content or []
    assert content is not None
    assert content.endswith("\ufffd")
    streamed = [e for c in stream if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert streamed == entries
    assert len(entries) == num_tokens
    assert "".join(entry.token for entry in entries) == content == text_of(stream)
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace") == content


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_token_means_one_token(tiny_model_dir: Path, is_stream: bool) -> None:
    async with running(tiny_model_dir, speak("the cat sat")) as service:
        if is_stream:
            stream = await chunks(service, max_tokens=1, stream_options={"include_usage": True})
            assert [c.choices[0].delta.content for c in stream[1:2]] == ["the"]
            assert sum(bool(c.choices and c.choices[0].delta.content) for c in stream) == 1
            assert stream[-2].choices[0].finish_reason == "length"
            usage = stream[-1].usage
        else:
            body = ChatCompletion.model_validate((await service.post(PATH, {**HELLO, "max_tokens": 1})).json())
            assert (body.choices[0].message.content, body.choices[0].finish_reason) == ("the", "length")
            usage = body.usage
    assert usage is not None
    assert usage.completion_tokens == 1


async def test_an_end_token_first_gives_empty_text_and_stop(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, lambda request, choice: [[EOS], "stop"]) as service:
        body = (await service.post(PATH, HELLO)).json()
        stream = await chunks(service)
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 1
    assert text_of(stream) == ""
    assert stream[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("num_tokens", range(1, 8))
async def test_completion_tokens_are_those_the_client_received(tiny_model_dir: Path, num_tokens: int) -> None:
    async with running(tiny_model_dir, speak("the cat and you")) as service:
        fields = {"max_tokens": num_tokens, "return_token_ids": True}
        stream = await chunks(service, **fields, stream_options={"include_usage": True})
        received = [t for c in stream if c.choices for t in (c.choices[0].model_extra or {}).get("token_ids") or []]
        body = (await service.post(PATH, {**HELLO, **fields})).json()
        assert received == body["choices"][0]["token_ids"] == service.ids("the cat and you")[:num_tokens]
        assert body["prompt_token_ids"] == service.dispatcher.requests[0].prompt_token_ids
    assert stream[-1].usage is not None
    assert stream[-1].usage.completion_tokens == body["usage"]["completion_tokens"] == len(received)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_n_choices_are_all_there(tiny_model_dir: Path, temperature: int) -> None:
    texts = ["the cat", "you", "block cache", ""]
    scripts = [speak(text) for text in texts]

    def script(request: Any, choice: int) -> Any:
        return scripts[choice](request, choice)

    async with running(tiny_model_dir, script) as service:
        body = ChatCompletion.model_validate(
            (await service.post(PATH, {**HELLO, "n": 4, "temperature": temperature})).json()
        )
        stream = await chunks(service, n=4)
        assert body.usage is not None
        assert body.usage.completion_tokens == sum(len(service.ids(text)) for text in texts)
    assert [choice.message.content for choice in body.choices] == texts
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    for index, text in enumerate(texts):
        assert text_of(stream, index) == text
        ends = [c.finish_reason for chunk in stream for c in chunk.choices if c.index == index and c.finish_reason]
        assert ends == ["stop"]


STOPS: list[tuple[str, str]] = [
    ("own fox", "The quick br"),
    ("k b", "The quic"),
    ("jumps over", "The quick brown fox "),
]


@pytest.mark.parametrize(("stop", "expected"), STOPS)
@pytest.mark.parametrize("together", [1, 4])
async def test_stop_strings_over_several_tokens(tiny_model_dir: Path, stop: str, expected: str, together: int) -> None:
    sentence = "The quick brown fox jumps over the dog"
    async with running(tiny_model_dir, speak(sentence, reason="length", together=together)) as service:
        body = (await service.post(PATH, {**HELLO, "stop": [stop, "never"]})).json()
        stream = await chunks(service, stop=stop, stream_options={"include_usage": True})
        included = (await service.post(PATH, {**HELLO, "stop": stop, "include_stop_str_in_output": True})).json()
        ids = service.ids(sentence)
        decode = service.frontend.prompts.tokenizer.decode
        num_needed = next(n for n in range(len(ids)) if stop in decode(ids[:n]))
    assert body["choices"][0]["message"]["content"] == text_of(stream) == expected
    assert body["choices"][0]["finish_reason"] == stream[-2].choices[0].finish_reason == "stop"
    assert included["choices"][0]["message"]["content"] == expected + stop
    assert stream[-1].usage is not None
    assert body["usage"]["completion_tokens"] == stream[-1].usage.completion_tokens == num_needed


async def test_a_stop_string_ends_the_choice_at_the_workers(tiny_model_dir: Path) -> None:
    never, ids = asyncio.Event(), build_tokenizer().encode("the cat sat").ids
    async with running(tiny_model_dir, lambda request, choice: [ids, never]) as service:
        body = (await service.post(PATH, {**HELLO, "stop": "cat"})).json()
        never.set()
        assert service.dispatcher.finished_choices == [0]
    assert body["choices"][0]["message"]["content"] == "the "


async def test_logprobs_are_finite_join_to_the_text_and_cover_all_tokens(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("the 👍 cat")) as service:
        fields = {"logprobs": True, "top_logprobs": 3}
        body = ChatCompletion.model_validate((await service.post(PATH, {**HELLO, **fields})).json())
        stream = await chunks(service, **fields)
        plain = (await service.post(PATH, {**HELLO, "logprobs": True})).json()
    assert body.choices[0].logprobs is not None
    entries = body.choices[0].logprobs.content or []
    assert body.usage is not None
    assert len(entries) == body.usage.completion_tokens
    assert "".join(entry.token for entry in entries) == "the 👍 cat"
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == "the 👍 cat"
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    assert all(entry.top_logprobs[2].logprob == -9999.0 for entry in entries)
    streamed = [e for c in stream if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert streamed == entries
    assert all(entry["top_logprobs"] == [] for entry in plain["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_timing_is_told_on_request_and_sums_up(tiny_model_dir: Path, is_stream: bool) -> None:
    async with running(tiny_model_dir, speak("the cat")) as service:
        body = {**HELLO, "stream": is_stream}
        by_header = await service.post(PATH, body, headers={"X-PDServe-Timing": "1"})
        plain = await service.post(PATH, body)
        if is_stream:
            by_field = await service.post(PATH, {**body, "stream_options": {"include_timing": True}})
            assert "timing" in events_of(by_field.text)[-2]["usage"]
    timing = (events_of(by_header.text)[-2] if is_stream else by_header.json())["usage"]["timing"]
    stages = [timing[f"{name}_s"] for name in ("frontend", "queue", "schedule", "prefill", "publish")]
    assert sum(stages) == pytest.approx(timing["ttft_s"], abs=1e-9)
    assert timing["ttft_s"] + timing["decode_s"] == pytest.approx(timing["total_s"], abs=1e-9)
    assert timing["frontend_s"] > 0
    assert "timing" not in plain.text


ERRORS = [
    (InvalidRequestError("too long", param="prompt", code="context_length_exceeded"), 400, None),
    (OverloadedError("queue full", retry_after_s=2.4), 429, "3"),
    (UnavailableError("no pair", retry_after_s=0.2), 503, "1"),
]


@pytest.mark.parametrize(("error", "status", "retry_after"), ERRORS)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("when", ["at the door", "before the first token"])
async def test_errors_before_the_first_token_keep_their_status(
    tiny_model_dir: Path, error: Any, status: int, retry_after: str | None, is_stream: bool, when: str
) -> None:
    refusal = error if when == "at the door" else None
    async with running(tiny_model_dir, lambda request, choice: [error], refusal=refusal) as service:
        response = await service.post(PATH, {**HELLO, "stream": is_stream})
    assert response.status_code == status
    assert response.json() == {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    }
    assert response.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_failure_in_mid_stream_is_an_error_event_without_done(tiny_model_dir: Path, num_choices: int) -> None:
    gate = asyncio.Event()
    failure = UnavailableError("the last attempt failed", code="attempts")
    async with (
        running(tiny_model_dir, lambda request, choice: [[80], gate, failure]) as service,
        service.client.stream("POST", PATH, json={**HELLO, "stream": True, "n": num_choices}) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            gate.set()
        whole = await service.post(PATH, HELLO)
    assert response.status_code == 200
    *before, last = events_of(text)
    assert before
    assert last["error"]["code"] == "attempts"
    assert all(choice["finish_reason"] is None for event in before for choice in event["choices"])
    assert whole.status_code == 503
    assert whole.json()["error"]["message"] == "the last attempt failed"


async def test_the_official_client_works_unchanged(tiny_model_dir: Path) -> None:
    async with (
        running(tiny_model_dir, speak("the cat sat")) as service,
        AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, seed=1
        )
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "developer", "content": "be nice"}, {"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        names = [model.id async for model in client.models.list()]
        completion = await client.completions.create(model="tiny", prompt="hi", max_tokens=2)
        with pytest.raises(BadRequestError, match="temperature"):
            await client.chat.completions.create(**HELLO, temperature=3)
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.chat.completions.create(**{**HELLO, "model": "other"})
        service.dispatcher.refusal = OverloadedError("queue full", retry_after_s=1)
        with pytest.raises(RateLimitError, match="queue full"):
            await client.chat.completions.create(**HELLO)
    assert answer.choices[0].message.content == text == "the cat sat"
    assert names == ["tiny"]
    assert completion.choices[0].text == "the "


async def test_the_request_that_reaches_the_dispatcher(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a"), max_total_tokens=100) as service:
        topology = {"remote_host": "127.0.0.1", "remote_port": 1, "disaggregation": "never"}
        headers = {"X-PDServe-Prefill": "p1", "X-PDServe-Decode": "d1"}
        await service.post(PATH, {**HELLO, **topology, "cache_salt": "x", "priority": 3}, headers=headers)
        too_long = await service.post(PATH, {**HELLO, "max_tokens": 100})
        (request,) = service.dispatcher.requests
    assert service.frontend.prompts.tokenizer.decode(request.prompt_token_ids) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.sampling.max_tokens == 100 - len(request.prompt_token_ids)
    assert (request.pinned_prefill, request.pinned_decode) == (None, None)
    assert (request.cache_salt, request.priority) == ("x", 3)
    assert request.deadline_s == request.received_s + 600
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
