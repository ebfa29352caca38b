"""A scripted chat server on a real socket, and a terminal that the test types into."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class ChatServer:
    """Answers each chat with the next of `answers`: a list of texts, an error dict, or a list that ends early."""

    def __init__(self) -> None:
        self.answers: list[list[Any] | tuple[int, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.hold = threading.Event()
        self.broken_pipes = threading.Event()
        self.url = ""
        self.models: dict[str, Any] = {"data": [{"id": "fake"}]}
        self.raw = {"[DONE]"}
        """Pieces that are sent as they are."""


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    state = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._json(200, state.models)

        def do_POST(self) -> None:
            state.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            state.headers.append(dict(self.headers))
            answer = state.answers.pop(0)
            if isinstance(answer, tuple):
                self._json(answer[0], {"error": {"message": answer[1]}})
                return
            self.send_response(200)
            self.end_headers()
            try:
                for piece in answer:
                    self._event(piece)
            except (BrokenPipeError, ConnectionResetError):
                state.broken_pipes.set()

        def _event(self, piece: Any) -> None:
            if piece == "HOLD":
                state.hold.set()
                while True:  # until the client leaves
                    self.wfile.write(b": keep-alive\n\n")
            if isinstance(piece, str) and piece not in state.raw:
                piece = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            text = piece if isinstance(piece, str) else json.dumps(piece)
            self.wfile.write(f"data: {text}\n\n".encode())

        def _json(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`typed("a", KeyboardInterrupt, "b")`: what the user enters at successive prompts; then end of input."""

    def script(*entries: str | type[BaseException]) -> None:
        waiting = iter(entries)

        def next_line(prompt: str = "") -> str:
            entry = next(waiting, EOFError)
            if isinstance(entry, str):
                return entry
            raise entry

        monkeypatch.setattr("builtins.input", next_line)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    return script
