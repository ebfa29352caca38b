"""Tokenizing, rendering and the model list ask no worker, and agree with what a request would send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_in import running, speak
from transformers import AutoTokenizer

MESSAGES = [{"role": "user", "content": "the cat <|im_end|> 雪"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_goes_to_ids_and_back(tiny_model_dir: Path, prefix: str) -> None:
    text = "the cat <|im_end|> 雪"
    truth = AutoTokenizer.from_pretrained(tiny_model_dir)(text)["input_ids"]
    async with running(tiny_model_dir, speak("a")) as service:
        tokens = (await service.post(f"{prefix}/tokenize", {"prompt": text, "return_token_strs": True})).json()
        back = (await service.post(f"{prefix}/detokenize", {"tokens": tokens["tokens"]})).json()
    assert tokens["tokens"] == truth
    assert tokens["count"] == len(truth) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 4096
    assert back == {"prompt": text}


async def test_a_chat_is_rendered_as_it_would_be_sent(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        await service.post("/v1/chat/completions", {"messages": MESSAGES})
        (request,) = service.dispatcher.requests
        rendered = (await service.post("/v1/chat/completions/render", {"messages": MESSAGES})).json()
        tokens = (await service.post("/tokenize", {"messages": MESSAGES})).json()
    assert rendered["prompt"] == "<|im_start|>user\nthe cat <|im_end|> 雪<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["prompt_token_ids"] == tokens["tokens"] == request.prompt_token_ids
    assert rendered["num_prompt_tokens"] == tokens["count"] == len(request.prompt_token_ids)
    assert sum(token_id < 3 for token_id in request.prompt_token_ids) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
    ],
)
async def test_bad_bodies_are_refused_by_name(tiny_model_dir: Path, path: str, body: Any, param: str) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize", "/v1/chat/completions/render", "/v1/completions"])
async def test_another_model_is_a_404_everywhere(tiny_model_dir: Path, path: str) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        response = await service.post(path, {"model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


async def test_templates_that_refuse_are_a_400_before_any_worker(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "chat_template_kwargs": {"eos_token": "x"}}
        response = await service.post("/v1/chat/completions", body)
        assert service.dispatcher.requests == []
    assert response.status_code == 400
    assert "{%" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions/render"])
async def test_a_model_may_have_several_names_and_answers_by_the_one_that_was_asked_for(
    tiny_model_dir: Path, path: str
) -> None:
    body = {"messages": MESSAGES, "prompt": "the", "max_tokens": 1}
    async with running(tiny_model_dir, speak("a"), served_name="tiny,org/tiny-1b,gpt-4o") as service:
        listed = (await service.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "org/tiny-1b", "gpt-4o"]
        assert {model["root"] for model in listed} == {"tiny"}
        assert (await service.client.get("/v1/models/org/tiny-1b")).json()["id"] == "org/tiny-1b"
        for name in ("tiny", "org/tiny-1b", "gpt-4o"):
            assert (await service.post(path, {**body, "model": name})).json()["model"] == name
        assert (await service.post(path, body)).json()["model"] == "tiny"
        for name in ("tiny,org/tiny-1b", "TINY", " tiny", ""):
            assert (await service.post(path, {**body, "model": name})).status_code == 404
        streamed = await service.post("/v1/completions", {**body, "model": "gpt-4o", "stream": True})
        assert streamed.text.count('"model":"gpt-4o"') == streamed.text.count('"model"') > 0
