"""A thread that READs blocks: it takes commands, plays rounds (`pull_rounds.py`), and sleeps while nothing happens.

It is the only one that touches its transports (but for `expect` and `forget`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdserve.mailbox import Mailbox
from pdserve.transfer.pulls.pull_rounds import PullRounds

_BUSY_WAIT_S = 0.0005
"""Between rounds while READs are on their way."""
_SERVE_WAIT_S = 0.001
_WATCH_WAIT_S = 0.01
"""While there are only quarantined READs, and connections that no request needs yet."""
_IDLE_WAIT_S = 0.25
"""A slow beat, so that a peer's wire-up is answered even where `set_serving` was not called."""

_log = logging.getLogger(__name__)


class TransferThread:
    """Plays the rounds of one set of transports; they belong to it from `start` on."""

    def __init__(self, name: str, rounds: PullRounds) -> None:
        self._rounds = rounds
        self._commands: Mailbox[Callable[[PullRounds], None]] = Mailbox()
        self._is_stopping = False
        self._is_serving = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- any thread

    def start(self) -> None:
        """Start the thread; rounds begin at once."""
        self._thread.start()

    def command(self, command: Callable[[PullRounds], None]) -> None:
        """Have something done there, in the order of the calls; nothing once it has ended."""
        self._commands.put(command)

    def set_serving(self, is_serving: bool) -> None:
        """Whether peers may READ from this worker at any moment."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._commands.put(_do_nothing)

    def stop(self) -> None:
        """Begin to let READs end for a short while and to tear everything down; `join` waits for that."""
        self._is_stopping = True
        self._commands.put(_do_nothing)

    def join(self) -> None:
        """After it nothing writes blocks any more. One that never started is torn down here. Again: nothing."""
        if self._thread.is_alive():
            self._thread.join()
        elif self._thread.ident is None:
            self._take_commands()
            self._rounds.tear_down()

    # --- itself

    def _run(self) -> None:
        is_busy = True
        while not self._is_stopping:
            try:
                if not is_busy:
                    self._commands.wait(self._wait_s())
                self._take_commands()
                is_busy = self._rounds.round()
            except Exception:
                _log.exception("a round of the transfer thread failed; it goes on")
                is_busy = False
        self._take_commands()
        self._rounds.drain()
        self._rounds.tear_down()

    def _wait_s(self) -> float:
        if self._rounds.has_pulls:
            return _BUSY_WAIT_S
        if self._is_serving:
            return _SERVE_WAIT_S
        is_watching = self._rounds.num_quarantined_blocks or self._rounds.is_preparing
        return _WATCH_WAIT_S if is_watching else _IDLE_WAIT_S

    def _take_commands(self) -> None:
        for command in self._commands.take():
            command(self._rounds)


def _do_nothing(rounds: PullRounds) -> None:
    pass
