"""A live line on stderr about a running benchmark. Writes at most a few times a second, nothing when not a terminal."""

from __future__ import annotations

import time
from typing import TextIO

_TERMINAL_INTERVAL_S = 0.25
_PLAIN_INTERVAL_S = 10.0


class Progress:
    """Counts and tells; one line that rewrites itself on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_line = False
        self.start("", 0)

    def start(self, stage: str, num_requests: int) -> None:
        """Begin a stage, such as `warm-up`, with this many requests to send."""
        self.finish()
        self._stage, self._num_requests = stage, num_requests
        self._num_sent = self._num_done = self._num_failed = self._num_tokens = 0
        self._start_s = self._written_s = time.monotonic()

    def on_sent(self) -> None:
        """Count a request that was sent."""
        self._num_sent += 1
        self._write()

    def on_done(self, num_tokens: int, is_ok: bool) -> None:
        """Count a request that ended, with its output tokens."""
        self._num_done += 1
        self._num_failed += not is_ok
        self._num_tokens += num_tokens
        self._write()

    def finish(self) -> None:
        """Leave the line clean for what comes next."""
        if self._has_line:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._has_line = False

    def _write(self) -> None:
        now_s = time.monotonic()
        if now_s - self._written_s < (_TERMINAL_INTERVAL_S if self._is_terminal else _PLAIN_INTERVAL_S):
            return
        self._written_s = now_s
        elapsed_s = now_s - self._start_s
        line = (
            f"{self._stage}: {self._num_done}/{self._num_requests} done, {self._num_sent - self._num_done} running, "
            f"{self._num_failed} failed, {self._num_tokens / elapsed_s:.0f} output tok/s, {elapsed_s:.0f} s"
        )
        self._out.write(f"\r\x1b[K{line}" if self._is_terminal else line + "\n")
        self._out.flush()
        self._has_line = self._is_terminal
