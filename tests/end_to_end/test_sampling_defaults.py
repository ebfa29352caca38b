"""A whole service on a folder that names its sampling: with GENERATION_CONFIG auto and off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from pdserve.local.service import PrivateService

NAMED = {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.95, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copytree(tiny_model_dir, tmp_path_factory.mktemp("named") / "named")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **NAMED}))
    return folder


@pytest.fixture(scope="module", params=["auto", "off"])
def named_service(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[PrivateService, str]]:
    settings = {"GENERATION_CONFIG": request.param, "NUM_BLOCKS": 256}
    with PrivateService(folder, settings=settings) as running:
        yield running, request.param


def texts(url: str, http: httpx.Client, seeds: range = range(5), **fields: Any) -> set[str]:
    body = {"prompt": "the of and to", "max_tokens": 8, **fields}
    answers = [http.post(f"{url}/v1/completions", json={**body, "seed": seed}) for seed in seeds]
    assert {answer.status_code for answer in answers} == {200}
    return {answer.json()["choices"][0]["text"] for answer in answers}


def test_top_k_1_gives_every_seed_the_same_text_unless_it_is_off(
    named_service: tuple[PrivateService, str], http: httpx.Client
) -> None:
    service, is_on = named_service[0], named_service[1] == "auto"
    assert (len(texts(service.url, http)) == 1) is is_on
    own = {**dict.fromkeys(NAMED), "temperature": 1, "top_k": 0, "top_p": 1, "repetition_penalty": 1}
    own.pop("do_sample")
    assert len(texts(service.url, http, **own)) == 5
    named = {name: value for name, value in NAMED.items() if name != "do_sample"}
    assert (texts(service.url, http) == texts(service.url, http, **named)) is is_on
    (model,) = http.get(f"{service.url}/v1/models").json()["data"]
    assert model["sampling_defaults"]["top_k"] == (1 if is_on else 0)
