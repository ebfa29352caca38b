"""The console blocks of docs/tour.md: their commands, their outputs, and a shell that runs them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_END = "--- end of a command ---"
_MASKS = (
    (r"\b(chatcmpl|cmpl|req)-[0-9a-f]{32}", r"\1-<id>"),
    (r"<id>:\d+", "<id>:<number>"),
    (r'"created":\d+', '"created":<time>'),
    (r"\bpdserve-[0-9a-f]{12}", "pdserve-<fingerprint>"),
    (r"\bgateway-[0-9a-f]{12}", "gateway-<id>"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:<port>"),
    (r'"(\w+_s)":[0-9.e-]+', r'"\1":<seconds>'),
    (r"\d+\.\d{3,}", "<number>"),
)
"""What differs from one run to another."""


@dataclass(frozen=True)
class Step:
    """One command as a reader types it, and what the page says it prints."""

    command: str
    output: str


def steps(page: str) -> list[Step]:
    """All commands of the console blocks, in order."""
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            num_lines = 1 + next(n for n, line in enumerate(lines) if not line.endswith("\\"))
            found.append(Step("\n".join(lines[:num_lines]), "\n".join(lines[num_lines:]).strip()))
    return found


def masked(output: str) -> str:
    """An output without what differs from one run to another."""
    for pattern, replacement in _MASKS:
        output = re.sub(pattern, replacement, output)
    return output.strip()


class Shell:
    """One bash for all commands: variables live on. A context manager."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        self._env, self._folder = dict(env), folder

    def __enter__(self) -> Self:
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            cwd=self._folder,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bash.kill()
        self._bash.communicate()

    def run(self, command: str) -> str:
        """What a command prints."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{command}\necho; echo '{_END}'\n")
        self._bash.stdin.flush()
        lines = iter(self._bash.stdout.readline, "")
        printed = []
        for line in lines:
            if line.strip() == _END:
                return "".join(printed).strip()
            printed.append(line)
        raise AssertionError(f"bash ended in the middle of {command!r}: {''.join(printed)}")
