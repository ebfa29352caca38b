"""How `benchmarks.peers` talks to an engine in a process of its own: one JSON object a line, one at a time.

Imports nothing but the standard library: engines run in environments where pdserve is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Protocol

VOCABULARY = 40_000
"""Token ids are drawn below this: every engine's vocabulary is larger."""


class Steps(Protocol):
    """What is measured of an engine, without HTTP."""

    versions: dict[str, str]

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of some decode steps of `batch` sequences that hold `context` tokens or a few more."""
        ...

    def prefill(self, tokens: int) -> list[float]:
        """Seconds to compute one prompt that no cache knows, up to the choice of its first token."""
        ...

    def greedy(self, tokens: list[int], num: int) -> list[int]:
        """The most likely next tokens: proves that engines compute the same model."""
        ...


def serve(make: Any, *arguments: Any) -> None:
    """Make the engine and obey lines on stdin until it ends; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        engine: Steps = make(*arguments)
        answer(engine.versions)
        for line in sys.stdin:
            name, parameters = json.loads(line)
            answer(getattr(engine, name)(*parameters))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt that differs from those of other numbers from its first token on."""
    return [(number * 7919 + index * 104_729 * (index > 0)) % VOCABULARY + 10 for index in range(tokens)]
