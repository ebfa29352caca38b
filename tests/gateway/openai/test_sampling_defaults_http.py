"""The model's generation_config.json speaks where a client is silent; a client's own values win, one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_in import Service, running, speak

from pdserve.models.generation_config import SamplingDefaults
from pdserve.sampling_params import SamplingParams

MODELS = SamplingDefaults(temperature=0.6, top_k=1, top_p=0.95, min_p=0.1, repetition_penalty=1.3, max_tokens=7)
BODY = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "seed": 1}
PATHS = ["/v1/chat/completions", "/v1/completions"]


async def sampling(service: Service, path: str, **body: Any) -> SamplingParams:
    service.frontend.card = replace(service.frontend.card, sampling_defaults=MODELS)
    response = await service.post(path, {**BODY, **body})
    assert response.status_code == 200, response.text
    return service.dispatcher.requests[-1].sampling


def told(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}


OF_MODEL = {"temperature": 0.6, "top_k": 1, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.3}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("silence", [{}, dict.fromkeys(OF_MODEL)])
async def test_a_silent_client_gets_the_models_own(tiny_model_dir: Path, path: str, silence: dict[str, Any]) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        assert told(await sampling(service, path, **silence)) == OF_MODEL


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value", "effective"),
    [
        ("temperature", 1, 1),
        ("temperature", 0, 0),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 5, 5),
        ("top_p", 1, 1),
        ("min_p", 0, 0),
        ("repetition_penalty", 1, 1),
    ],
)
async def test_a_value_of_the_client_wins_and_the_others_stay(
    tiny_model_dir: Path, path: str, name: str, value: float, effective: float
) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        assert told(await sampling(service, path, **{name: value})) == {**OF_MODEL, name: effective}


async def test_the_models_limit_is_that_of_silent_chats(tiny_model_dir: Path) -> None:
    chat, completions = PATHS
    async with running(tiny_model_dir, speak("a"), max_total_tokens=40) as service:
        assert (await sampling(service, chat)).max_tokens == 7
        assert (await sampling(service, chat, max_tokens=9)).max_tokens == 9
        assert (await sampling(service, chat, truncate_prompt_tokens=-1)).max_tokens <= 7
        assert (await sampling(service, completions)).max_tokens == 16


async def test_the_model_list_shows_them(tiny_model_dir: Path) -> None:
    async with running(tiny_model_dir, speak("a")) as service:
        (model,) = (await service.client.get("/v1/models")).json()["data"]
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": None}
    assert model["sampling_defaults"] == usual
