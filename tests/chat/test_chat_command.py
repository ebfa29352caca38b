from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.commands.chat import main

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
TIMING = {"frontend_s": 0.001, "prefill_s": 0.009, "ttft_s": 0.01, "decode_s": 0.02, "total_s": 0.03}


def test_one_prompt_gives_one_streamed_answer(chat_server, capsys: pytest.CaptureFixture[str]) -> None:
    chat_server.answers = [["Hel", "lo\n", "you", USAGE, "[DONE]"]]
    assert main(["hi", "--url", chat_server.url, "--system", "be brief", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "Hello\nyou\n"
    body = chat_server.bodies[0]
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["stream"], body["max_completion_tokens"]) == ("fake", True, 9)


def test_a_prompt_may_come_from_stdin(chat_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    chat_server.answers = [["ok", "[DONE]"]]
    assert main(["--url", chat_server.url]) == 0
    assert chat_server.bodies[0]["messages"] == [{"role": "user", "content": "from a pipe"}]


def test_timing_asks_for_the_waterfall_and_prints_it(chat_server, capsys: pytest.CaptureFixture[str]) -> None:
    chat_server.answers = [["a", {"choices": [], "usage": USAGE["usage"] | {"timing": TIMING}}, "[DONE]"]]
    assert main(["hi", "--timing", "--url", chat_server.url]) == 0
    assert chat_server.headers[0]["X-PDServe-Timing"] == "1"
    printed = capsys.readouterr().out
    assert "TTFT" in printed
    assert "30.0 ms  = 10.0 + 20.0" in printed


def test_a_conversation_keeps_its_history_until_reset(chat_server, typed) -> None:
    typed("one", "", "two", "/what", "/reset", "three", "/quit", "never sent")
    chat_server.answers = [["1", "[DONE]"], ["2", "[DONE]"], ["3", "[DONE]"]]
    assert main(["--url", chat_server.url]) == 0
    contents = [[m["content"] for m in body["messages"]] for body in chat_server.bodies]
    assert contents == [["one"], ["one", "1", "two"], ["three"]]


def test_ctrl_c_at_the_prompt_does_not_leave_and_end_of_input_does(chat_server, typed) -> None:
    typed(KeyboardInterrupt, "hello")
    chat_server.answers = [["x", "[DONE]"]]
    assert main(["--url", chat_server.url]) == 0
    assert len(chat_server.bodies) == 1


class Terminal(io.StringIO):
    """Notes when a word was shown."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.shown = word, threading.Event()

    def flush(self) -> None:
        if self.word in self.getvalue():
            self.shown.set()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell that starts something in the background makes it ignore Ctrl-C: these tests, for example."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_stops_the_current_answer_only_and_hangs_up(
    chat_server, typed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("long", "short")
    chat_server.answers = [["par", "tial", "HOLD"], ["ok", "[DONE]"]]
    terminal = Terminal("partial")
    monkeypatch.setattr("sys.stdout", terminal)
    user = threading.get_ident()
    thread = threading.Thread(target=lambda: terminal.shown.wait(10) and signal.pthread_kill(user, signal.SIGINT))
    thread.start()
    assert main(["--url", chat_server.url]) == 0
    thread.join()
    assert chat_server.broken_pipes.wait(10), "the connection of the stopped answer was closed"
    assert "partial\n" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("ok")
    assert "(stopped)" in capsys.readouterr().err
    assert [m["content"] for m in chat_server.bodies[1]["messages"]] == ["long", "partial", "short"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, "no pair is ready"), "503: no pair is ready"),
        (["a", {"error": {"message": "worker lost"}}], "worker lost"),
        (["a"], "without [DONE]"),
    ],
)
def test_an_incomplete_answer_is_told_and_fails(
    chat_server, capsys: pytest.CaptureFixture[str], answer: object, words: str
) -> None:
    chat_server.answers = [answer]
    assert main(["hi", "--url", chat_server.url]) == 1
    assert words in capsys.readouterr().err


def test_a_failed_question_does_not_stay_in_the_history(chat_server, typed) -> None:
    typed("one", "two")
    chat_server.answers = [(500, "no"), ["2", "[DONE]"]]
    assert main(["--url", chat_server.url]) == 0
    assert [m["content"] for m in chat_server.bodies[1]["messages"]] == ["two"]


def test_without_a_service_the_message_names_the_command_that_starts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    monkeypatch.setattr("pdserve.local.find_service.DEFAULT_URL", "http://127.0.0.1:9")
    assert main(["hi"]) == 1
    message = capsys.readouterr().err
    assert "pdserve up" in message
    assert "http://127.0.0.1:9" in message


def test_something_else_at_the_url_is_said_in_a_sentence(
    chat_server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_server, "models", {"hello": "world"})
    assert main(["hi", "--url", chat_server.url]) == 1
    assert "is no OpenAI-compatible service" in capsys.readouterr().err


def test_an_event_that_cannot_be_read_is_no_traceback(chat_server, capsys: pytest.CaptureFixture[str]) -> None:
    chat_server.answers = [["a", "[NONSENSE", "[DONE]"]]
    chat_server.raw = {"[NONSENSE"}
    assert main(["hi", "--url", chat_server.url]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_an_answer_is_bounded_and_its_temperature_moderate_where_the_model_says_none(
    chat_server, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    chat_server.answers = [["and so on", cut, "[DONE]"]]
    assert main(["hi", "--url", chat_server.url]) == 0
    assert (chat_server.bodies[0]["max_completion_tokens"], chat_server.bodies[0]["temperature"]) == (1024, 0.7)
    assert "(cut after 1024 tokens; --max-tokens allows more)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("defaults", "flags", "temperature"),
    [
        ({"temperature": 0.6, "top_k": 20}, [], None),
        ({"temperature": 1.0, "top_p": 0.9}, [], None),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}, [], 0.7),
        ({"temperature": 0.6}, ["--temperature", "0.2"], 0.2),
        (None, ["--temperature", "1"], 1.0),
        (None, [], 0.7),
    ],
)
def test_the_models_own_sampling_is_left_to_the_service(
    chat_server, defaults: dict[str, float] | None, flags: list[str], temperature: float | None
) -> None:
    chat_server.models = {"data": [{"id": "fake", "sampling_defaults": defaults}]}
    chat_server.answers = [["a", "[DONE]"]]
    assert main(["hi", "--url", chat_server.url, *flags]) == 0
    assert chat_server.bodies[0].get("temperature") == temperature


def test_a_model_that_is_not_served_is_named_with_those_that_are(
    chat_server, capsys: pytest.CaptureFixture[str]
) -> None:
    chat_server.models = {"data": [{"id": "one"}, {"id": "two"}]}
    assert main(["hi", "--url", chat_server.url, "--model", "nope"]) == 1
    assert "serves one, two, not 'nope'" in capsys.readouterr().err
