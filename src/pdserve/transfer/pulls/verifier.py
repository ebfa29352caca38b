"""Compares blocks that were READ with the digests that their peer announced.

On a CPU the transfer thread does it itself, while the blocks are still in its core's cache. A device digests blocks
when it comes to it, so that is done aside and no round waits for it.
"""

from __future__ import annotations

from concurrent.futures import Executor

import torch

from pdserve.reasons import TransferReason
from pdserve.transfer.digest import wrong_block_counter
from pdserve.transfer.memory import bytes_view
from pdserve.transfer.pulls.active_pull import ActivePull
from pdserve.transfer.pulls.pull import PullFaults, fail_if_asked


class Verifier:
    """Verifies blocks of one KV cache, for any number of transfer threads.

    Args:
        kv_cache: `[num_blocks, …]`, what READs are written into.
        aside: where comparisons run; None: in the thread that asks.
        faults: test hooks.
    """

    def __init__(self, kv_cache: torch.Tensor, *, aside: Executor | None, faults: PullFaults | None) -> None:
        self._blocks = bytes_view(kv_cache)
        self._count_wrong_blocks = wrong_block_counter(kv_cache)
        self._aside, self._faults = aside, faults

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._blocks.shape[1]

    @property
    def is_aside(self) -> bool:
        """Whether verdicts come later."""
        return self._aside is not None

    def count_wrong(self, pull: ActivePull, indices: range) -> int | None:
        """Number of a READ's blocks that differ; None when that is found out aside, in `pull.verifying`.

        Raises:
            TransferError: a test hook makes the stage copy or verify fail.
            Exception: they cannot be compared.
        """
        local_ids, announced = pull.local_ids(indices), pull.digests(indices)
        fail_if_asked(self._faults, TransferReason.COPY)
        if self._faults and self._faults.take("corrupt_block"):
            self._blocks[local_ids[0], 0] ^= 1
        fail_if_asked(self._faults, TransferReason.VERIFY)
        if not announced:
            return 0
        if self._aside is None:
            return self._count_wrong_blocks(local_ids, announced)
        pull.verifying.append((self._aside.submit(self._count_wrong_blocks, local_ids, announced), indices))
        return None
