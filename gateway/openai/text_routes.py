"""Text ↔ token ids over HTTP, and the model list: nothing here asks a worker.

`/v1/chat/completions/render` shows the exact text and token ids that a chat request would send to the model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import Route

from pdserve.errors import InvalidRequestError
from pdserve.gateway.http.body import Fields
from pdserve.gateway.http.error_body import http_error
from pdserve.gateway.http.system_routes import READING
from pdserve.gateway.openai.chat import read_chat, read_max_tokens
from pdserve.gateway.openai.endpoint import PostEndpoint
from pdserve.gateway.openai.frontend import Call, Frontend
from pdserve.gateway.openai.options import read_truncation
from pdserve.gateway.openai.reply import max_total_tokens


async def tokenize(frontend: Frontend, call: Call, fields: Fields) -> None:
    """A raw text (`prompt`) or a chat (`messages`) → token ids."""
    loop, prompts = asyncio.get_running_loop(), frontend.prompts
    if fields.has("messages"):
        prompt = await loop.run_in_executor(frontend.executor, prompts.build, read_chat(fields))
        token_ids = prompt.token_ids
    else:
        encode = partial(prompts.tokenizer.encode, add_special_tokens=fields.boolean("add_special_tokens", True))
        token_ids = await loop.run_in_executor(frontend.executor, encode, _required_text(fields, "prompt"))
    body: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": frontend.card.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if fields.boolean("return_token_strs", False):
        entry = prompts.tokenizer.backend_tokenizer.id_to_token
        shown = loop.run_in_executor(frontend.executor, lambda: [entry(token_id) for token_id in token_ids])
        body["token_strs"] = await shown
    await call.responder.json(body)


async def detokenize(frontend: Frontend, call: Call, fields: Fields) -> None:
    """Token ids → text, special tokens included."""
    if not isinstance(fields.get("tokens"), list):
        raise fields.refuse("tokens", "a list of token ids")
    token_ids = fields.token_ids("tokens", frontend.card.vocab_size)
    decode = frontend.prompts.tokenizer.decode
    text = await asyncio.get_running_loop().run_in_executor(frontend.executor, decode, token_ids)
    await call.responder.json({"prompt": text})


async def render(frontend: Frontend, call: Call, fields: Fields) -> None:
    """What a chat request sends to the model, without sending it."""
    loop, chat = asyncio.get_running_loop(), read_chat(fields)
    truncation, max_tokens = read_truncation(fields), read_max_tokens(fields)
    prompt = await loop.run_in_executor(frontend.executor, frontend.prompts.build, chat)
    text, token_ids = prompt.text, prompt.token_ids
    if truncation is not None:
        token_ids = truncation.apply(token_ids, max_tokens, max_total_tokens(frontend))
        text = await loop.run_in_executor(frontend.executor, frontend.prompts.tokenizer.decode, token_ids)
    await call.responder.json(
        {
            "model": call.model,
            "prompt": text,
            "prompt_token_ids": token_ids,
            "num_prompt_tokens": len(token_ids),
        }
    )


def add_text_routes(app: FastAPI, frontend: Frontend) -> None:
    """Add the routes of this file to the app."""
    for prefix in ("", "/v1"):
        for name, handler in (("tokenize", tokenize), ("detokenize", detokenize)):
            app.router.routes.append(Route(f"{prefix}/{name}", PostEndpoint(frontend, handler), methods=["POST"]))
    rendering = PostEndpoint(frontend, render)
    app.router.routes.append(Route("/v1/chat/completions/render", rendering, methods=["POST"]))
    app.include_router(_model_routes(frontend))


def _model_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter()
    card, created = frontend.card, int(time.time())
    models = {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "root": card.served_name,
            "parent": None,
            "max_model_len": card.max_model_len,
            "sampling_defaults": dataclasses.asdict(card.sampling_defaults),
        }
        for name in card.served_names
    }

    @router.api_route("/v1/models", methods=READING)
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": list(models.values())})

    @router.api_route("/v1/models/{name:path}", methods=READING)
    async def one_model(name: str) -> JSONResponse:
        if not name:
            return await list_models()
        model = models.get(name.removesuffix("/"))
        if model is None:
            raise http_error(404, f"The model {name[:80]!r} does not exist here.", code="model_not_found")
        return JSONResponse(model)

    return router


def _required_text(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if text is None:
        raise InvalidRequestError(f"{name} or messages must be given", param=name)
    return text
