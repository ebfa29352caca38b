"""One conversation: keeps the history, streams an answer, hands its pieces over. Never touches the terminal."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdserve.bench.sse import SseParser
from pdserve.errors import PdserveError

LIMIT = "max_completion_tokens"
MODERATE_TEMPERATURE = 0.7
"""Where neither the user nor the model says one: less nonsense than 1, and not always the same words."""
_SILENT = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What a service shows as its `sampling_defaults` when the model's makers have said nothing."""


class ChatError(PdserveError):
    """The service did not give a complete answer; the message says why and what to do."""


@dataclass
class Conversation:
    """A chat with one model. `usage` is the last answer's, once it is complete."""

    client: httpx.Client
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of every request, such as max_tokens."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False
    """The last answer was as long as it may be, and not at its end."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything said so far."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer's text as it arrives. A closed or broken answer stays in the history as far as it came.

        Raises:
            ChatError: nothing answers, an HTTP error, or an error in mid-stream.
        """
        self.usage, self.is_cut = {}, False
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            for piece in self._pieces():
                said.append(piece)
                yield piece
        finally:  # also when the caller stops listening
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()

    def _pieces(self) -> Iterator[str]:
        body = {"model": self.model, "messages": self.messages, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | self.options
        parser, is_done = SseParser(), False
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_error_text(response))
                for chunk in response.iter_raw():
                    for data in parser.feed(chunk):
                        is_done = is_done or data == b"[DONE]"
                        yield from self._text_of(data)
        except httpx.HTTPError as error:
            raise ChatError(f"the answer broke off: {_reason(error)}") from error
        if not is_done:
            raise ChatError("the answer broke off: the stream ended without [DONE]")

    def _text_of(self, data: bytes) -> Iterator[str]:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ChatError("the answer broke off: an event of it cannot be read") from None
        if event.get("error"):
            raise ChatError(f"the answer broke off: {event['error'].get('message', event['error'])}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.is_cut = self.is_cut or choice.get("finish_reason") == "length"
            delta = choice.get("delta") or {}
            if text := (delta.get("content") or delta.get("reasoning_content")):
                yield text


def open_conversation(
    client: httpx.Client, model: str | None, options: dict[str, Any], system: str | None
) -> Conversation:
    """Begin a chat with `model`, or with the first that the service lists.

    Raises:
        ChatError: nothing answers there, or it does not serve this model.
    """
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatError(
            f"no service answers at {client.base_url} ({_reason(error)}): "
            "start one with `pdserve up`, or name another with --url"
        ) from error
    if response.status_code != 200:
        raise ChatError(_error_text(response))
    try:
        defaults = {entry["id"]: entry.get("sampling_defaults") or {} for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ChatError(
            f"what answers at {client.base_url} is no OpenAI-compatible service; name one with --url"
        ) from None
    if not defaults:
        raise ChatError(f"the service at {client.base_url} serves no model")
    if model is not None and model not in defaults:
        raise ChatError(f"the service at {client.base_url} serves {', '.join(defaults)}, not {model!r}")
    model = model or next(iter(defaults))
    has_own = any(defaults[model].get(name, usual) != usual for name, usual in _SILENT.items())
    return Conversation(client, model, options if has_own else {"temperature": MODERATE_TEMPERATURE} | options, system)


def _error_text(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:300]
    return f"the service answered {response.status_code}: {message}"


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
