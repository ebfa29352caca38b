"""`pdserve chat`: talk to a running service in the terminal. One answer with a prompt, else a conversation."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any, TextIO

import httpx

from pdserve.arguments import CommandParser
from pdserve.chat.session import LIMIT, MODERATE_TEMPERATURE, Conversation, open_conversation
from pdserve.chat.timing import waterfall
from pdserve.errors import PdserveError, SettingError
from pdserve.local.find_service import service_url

MAX_TOKENS = 1024
"""The longest answer: a small model that draws at random may never end by itself."""
_HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when there was no complete answer to a one-shot prompt."""
    args = _parser().parse_args(argv)
    try:
        url = service_url(args.url, args.service, os.environ)
        with httpx.Client(base_url=url, headers=_headers(args.timing), timeout=_timeout()) as client:
            conversation = open_conversation(client, args.model, _options(args), args.system)
            prompt = args.prompt if args.prompt is not None or sys.stdin.isatty() else sys.stdin.read()
            if prompt is None:
                return _converse(conversation, args.timing)
            return 0 if _answer(conversation, prompt, args.timing) else 1
    except PdserveError as error:
        print(f"pdserve chat: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _converse(conversation: Conversation, has_timing: bool) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  gives input() editing and recall, where it exists
    print(f"{conversation.model}: {_HELP}")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line == "/quit":
            return 0
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            _answer(conversation, line, has_timing)


def _answer(conversation: Conversation, prompt: str, has_timing: bool) -> bool:
    """Print one answer as it comes; whether it was complete."""
    pieces = conversation.ask(prompt)
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                _write(sys.stdout, piece)
    except KeyboardInterrupt:
        _write(sys.stdout, "\n")
        print("(stopped)", file=sys.stderr)
        return False
    except PdserveError as error:
        _write(sys.stdout, "\n")
        print(f"pdserve chat: {error}", file=sys.stderr)
        return False
    _write(sys.stdout, "\n")
    if conversation.is_cut:
        print(f"(cut after {conversation.options[LIMIT]} tokens; --max-tokens allows more)", file=sys.stderr)
    if has_timing:
        _print_timing(conversation.usage)
    return True


def _print_timing(usage: dict[str, Any]) -> None:
    if timing := usage.get("timing"):
        print("\n" + "\n".join(waterfall(timing, usage.get("completion_tokens", 0))))
    else:
        print("(this service reports no timing)", file=sys.stderr)


def _write(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()


def _headers(has_timing: bool) -> dict[str, str]:
    api_key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return headers | ({"X-PDServe-Timing": "1"} if has_timing else {})


def _timeout() -> httpx.Timeout:
    """Long pauses are the service's business (keep-alive comments come while it works); connecting is ours."""
    return httpx.Timeout(600.0, connect=5.0)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    if args.max_tokens < 1:
        raise SettingError("--max-tokens", args.max_tokens, "a whole number of at least 1")
    given = {LIMIT: args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in given.items() if value is not None}


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="pdserve chat",
        description="Talk to a running service, streaming. The API key is read from OPENAI_API_KEY.",
    )
    parser.add_argument("prompt", nargs="?", help="one question; without it (and from a terminal): a conversation")
    parser.add_argument("--timing", action="store_true", help="show where the time went after each answer")
    parser.add_argument("--url", help="with or without http:// and /v1; default: the service that runs on this machine")
    parser.add_argument("--service", help="name of the service, where several run here")
    parser.add_argument("--model", help="default: the first that the service lists")
    parser.add_argument("--system", help="system message at the beginning of the conversation")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help=f"longest answer, in tokens (default: {MAX_TOKENS})"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help=f"sampling temperature (default: the model's own, or {MODERATE_TEMPERATURE} where it has none)",
    )
    return parser
