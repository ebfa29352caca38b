"""Compares received blocks with their digests in a thread of its own, so that the next READ is copied meanwhile.

Where that thread gets no processor, its owner does the work by itself when there is nothing else to do (`help`).
Reads blocks and never writes one. A result that nobody waits for any more is simply dropped by its taker.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from pdserve.transfer.digest import block_digests

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict(Generic[T]):
    """What was found out about some blocks."""

    tag: T
    """The caller's own."""
    num_blocks: int
    num_wrong: int
    """Blocks whose content is not what was announced."""
    failure: str = ""
    """Why the blocks could not be compared at all."""


class Verifier(Generic[T]):
    """The thread starts with the first blocks.

    Args:
        kv_cache: `[num_blocks, …]`.
        on_verdict: called in that thread whenever `take` has something new.
    """

    def __init__(self, kv_cache: torch.Tensor, on_verdict: Callable[[], None]) -> None:
        self._kv_cache = kv_cache
        self._on_verdict = on_verdict
        self._waiting: queue.SimpleQueue[tuple[T, list[int], list[bytes]] | None] = queue.SimpleQueue()
        self._verdicts: deque[Verdict[T]] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-verify", daemon=True)

    def begin(self, tag: T, block_ids: list[int], digests: list[bytes]) -> None:
        """Compare these blocks with their digests; `take` tells the result."""
        if self._thread.ident is None:
            self._thread.start()
        self._waiting.put((tag, block_ids, digests))

    def take(self) -> list[Verdict[T]]:
        """Verdicts since the last call."""
        return [self._verdicts.popleft() for _ in range(len(self._verdicts))]

    def help(self) -> bool:
        """Compare the blocks that wait longest in the calling thread; False when none wait."""
        try:
            item = self._waiting.get_nowait()
        except queue.Empty:
            return False
        if item is None:
            self._waiting.put(None)
            return False
        self._verdicts.append(self._compare(*item))
        return True

    def close(self) -> None:
        """Wait until no block is being read any more. Again: nothing."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._verdicts.append(self._compare(*item))
            self._on_verdict()

    def _compare(self, tag: T, block_ids: list[int], digests: list[bytes]) -> Verdict[T]:
        try:
            found = block_digests(self._kv_cache, block_ids)
        except Exception as error:  # whatever a device says: these blocks are not verified
            return Verdict(tag, len(block_ids), len(block_ids), f"{type(error).__name__}: {error}")
        return Verdict(tag, len(block_ids), sum(a != b for a, b in zip(digests, found, strict=True)))
