"""`pdserve up`: everything on this machine, in the foreground, until Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from pdserve import __version__
from pdserve.local.one_machine import OneMachine
from pdserve.local.plan import parse_up
from pdserve.local.service_file import LocalService
from pdserve.models.resolve import home_folder

_HELP = """usage: pdserve up [--model M] [--prefill N] [--decode N] [--port 8000] [--redis URL] [settings]

Starts a bus (unless --redis names one), a gateway and the workers; restarts what dies; Ctrl-C stops everything.

  --model M            demo (default), tiny, a Hugging Face folder, a .gguf file or hf://owner/name
  --prefill N          number of prefill workers (1)
  --decode N           number of decode workers (1)
  --gateways N         number of gateways behind the one port (1)
  --port N             port of the API (8000; 0 = any free one)
  --redis URL          use this server as the bus
  --service NAME       name of this service (default); several can run side by side, each on ports of its own
  --no-restart         leave dead processes dead
  --verbose            every log line of every process, not only warnings
  --ROLE.NAME V        a setting of gateway, prefill or decode alone, as --decode.max-num-seqs 8
  --NAME V             a setting of every process that knows it; `pdserve config` lists them
"""
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "stream": True,
}
"""Greedy: a model this small, drawing at random, says anything about France."""


def main(argv: list[str]) -> int:
    """Run until stopped; 0 after Ctrl-C or SIGTERM."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    start_s = time.monotonic()
    options = parse_up(argv)
    counts = ", ".join(f"{number} {role}" for role, number in options.num.items())
    print(f"pdserve {__version__}: {counts}", flush=True)

    def on_ready(service: LocalService) -> None:
        print(_ready_text(service, time.monotonic() - start_s), flush=True)

    OneMachine(options, env=os.environ, home=home_folder(os.environ), report=_report, on_ready=on_ready).run()
    print("stopped", flush=True)
    return 0


def _report(who: str, what: str) -> None:
    print(f"  {who:<12} {what}", file=sys.stderr, flush=True)


def _ready_text(service: LocalService, duration_s: float) -> str:
    body = json.dumps(QUESTION)
    return (
        f"\nReady after {duration_s:.1f} s at {service.url}  (logs: {service.log_folder})\n\n"
        f"  curl -N {service.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        "Ctrl-C stops everything."
    )
