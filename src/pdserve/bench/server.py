"""What the benchmark asks a server before measuring: its models, version and token counts. Never measured itself."""

from __future__ import annotations

from typing import Any

import httpx

from pdserve.bench.prompts import alphabet_text
from pdserve.errors import PdserveError


class ServerError(PdserveError):
    """The server cannot be reached or does not speak the OpenAI API; the message says what to do."""


class Server:
    """A few plain questions to an OpenAI-compatible server."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s)
        self._can_count_chats = True
        self._can_count = True

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Entries of /v1/models.

        Raises:
            ServerError: unreachable, or not such a server.
        """
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(
                f"no server answers at {self.url} ({type(error).__name__}); start one with `pdserve up`, or give --url"
            ) from error
        if response.status_code == 401:
            raise ServerError(f"{self.url} wants an API key: set OPENAI_API_KEY")
        try:
            models = response.json()["data"]
        except (ValueError, KeyError, TypeError):
            models = None
        if not isinstance(models, list) or not models:
            raise ServerError(f"{self.url}/v1/models answers {response.status_code} without a list of models")
        return models

    async def describe(self) -> dict[str, Any]:
        """What the server tells about its version and set-up, as it is."""
        try:
            response = await self._client.get("/version")
            answer = response.json() if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            answer = {}
        return answer if isinstance(answer, dict) else {"version": answer}

    async def ordinary_token_ids(self, model: str) -> list[int]:
        """Different ids of ordinary text by the server's own tokenizer; empty when it has no /tokenize."""
        answer = await self._tokenize({"model": model, "prompt": alphabet_text(), "add_special_tokens": False})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            return []
        return sorted(set(tokens))

    async def count_chat_tokens(self, model: str, text: str) -> int | None:
        """Prompt tokens of a chat with this one user message; without its template where the server cannot tell."""
        if self._can_count_chats:
            messages = [{"role": "user", "content": text}]
            count = _count(await self._tokenize({"model": model, "messages": messages}))
            if count is not None:
                return count
            self._can_count_chats = False
        if self._can_count:
            count = _count(await self._tokenize({"model": model, "prompt": text}))
            self._can_count = count is not None
            return count
        return None

    async def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post("/tokenize", json=body)
            answer = response.json() if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            answer = {}
        return answer if isinstance(answer, dict) else {}


def _count(answer: dict[str, Any]) -> int | None:
    count = answer.get("count", len(answer["tokens"]) if isinstance(answer.get("tokens"), list) else None)
    return count if isinstance(count, int) else None
