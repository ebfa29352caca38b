"""A tokenizer that knows more tokens than the model has rows for: what brings such a token is a 400 that names it."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from stand_in import Service, running, speak
from tokenizers import AddedToken, Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SPECIAL, PLAIN = "<image_soft_token>", "<tool_call>"


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with two added tokens that its embedding does not have."""
    folder = copytree(tiny_model_dir, tmp_path_factory.mktemp("wide") / "wide")
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(PLAIN, normalized=False)])
    tokenizer.save(str(file))
    return folder


async def refused(service: Service, path: str, text: str, **body: Any) -> None:
    """The message names the token, its id and the embedding's size; no worker is asked."""
    token_id = service.frontend.prompts.tokenizer.backend_tokenizer.token_to_id(text)
    vocab_size = service.frontend.card.vocab_size
    assert token_id >= vocab_size
    response = await service.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    for named in (repr(text), str(token_id), str(vocab_size - 1)):
        assert named in error["message"]
    assert error["code"] == "invalid_value"
    assert service.dispatcher.requests == []


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": f"a {PLAIN} b"}],
        [{"role": "user", "content": [{"type": "text", "text": f"a {PLAIN} b"}]}],
        [{"role": "system", "content": PLAIN}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "1", "content": f"{PLAIN}{PLAIN}"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PLAIN}, {"role": "user", "content": "go"}],
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_message_of_any_role(folder: Path, messages: list[Any], is_stream: bool) -> None:
    async with running(folder, speak("a")) as service:
        await refused(service, CHAT, PLAIN, messages=messages, max_tokens=3, stream=is_stream)


async def test_a_special_token_in_a_chat_stays_text(folder: Path) -> None:
    async with running(folder, speak("a")) as service:
        response = await service.post(CHAT, {"messages": [{"role": "user", "content": f"a {SPECIAL} b"}]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("text", [SPECIAL, PLAIN])
@pytest.mark.parametrize("prompt", ["{}", "a {} b", ["good", "bad {}"], ["{}", "good"], ["a", "b {} c", "d {}"]])
@pytest.mark.parametrize("fields", [{}, {"echo": True, "max_tokens": 0}, {"stream": True, "n": 2}])
async def test_a_prompt_or_one_of_a_list(folder: Path, text: str, prompt: Any, fields: dict[str, Any]) -> None:
    filled = prompt.replace("{}", text) if isinstance(prompt, str) else [one.replace("{}", text) for one in prompt]
    async with running(folder, speak("a")) as service:
        await refused(service, COMPLETIONS, text, prompt=filled, **fields)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_bad_word(folder: Path, path: str) -> None:
    async with running(folder, speak("a")) as service:
        prompt = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        await refused(service, path, PLAIN, **prompt, bad_words=["cat", PLAIN])


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids", "logit_bias", "prompt", "nested prompt"])
async def test_ids_are_refused_from_the_first_one_without_a_row(folder: Path, field: str) -> None:
    async with running(folder, speak("a")) as service:
        first = service.frontend.card.vocab_size
        bodies = {
            "logit_bias": {"logit_bias": {str(first): 1}},
            "nested prompt": {"prompt": [[5], [6, first]]},
        }
        body = {"prompt": "a", **bodies.get(field, {field: [first]})}
        response = await service.post(COMPLETIONS, body)
        assert service.dispatcher.requests == []
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field.rsplit(maxsplit=1)[-1]
    assert str(first) in response.json()["error"]["message"]


async def test_a_token_that_truncation_cuts_off_does_no_harm(folder: Path) -> None:
    async with running(folder, speak("a")) as service:
        body = {"prompt": f"{PLAIN} the cat sat", "truncate_prompt_tokens": 2}
        assert (await service.post(COMPLETIONS, body)).status_code == 200


async def test_tokenizing_shows_such_tokens(folder: Path) -> None:
    async with running(folder, speak("a")) as service:
        response = await service.post("/tokenize", {"prompt": f"a {PLAIN}", "return_token_strs": True})
    assert response.json()["token_strs"][-1] == PLAIN
